"use strict";
// The page of a prompt: arcs between its parts, and those of the token that is pointed at.
function viewOfPrompt({ data, find, choice, rows, tokens, elementOf, layer, text, draw }) {
  const unpack = (packed, Type) =>
    [...new Type(Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0)).buffer)];
  const Position = data.tokens.length <= 2 ** 16 ? Uint16Array : Uint32Array;
  const flowsOf = ({ keys, queries, sizes, share }) => ({ share, sizes: unpack(sizes, Float32Array),
    keys: unpack(keys, Position), queries: unpack(queries, Position) });
  const layers = data.layers.map((heads) => heads.map(flowsOf));
  const strongest = data.strongest.map(flowsOf);
  const kindOf = (from, to) => to.className.includes("target") && from.className.includes("label")
    ? "out" : to.className.includes("label") ? "into" : "other";
  let current = null;

  const arcs = (layer) => {
    const { keys, queries, sizes } = layers[layer][choice.value];
    return sizes.map((size, k) => ({ size, from: rows[keys[k]], to: rows[queries[k]],
      kind: kindOf(rows[keys[k]], rows[queries[k]]) }));
  };
  const show = () => {
    for (const token of tokens) token.classList.remove("from", "to", "here");
    if (current === null) return;
    const next = tokens[tokens.indexOf(current) + 1];
    const first = Number(current.dataset.token);
    const last = next ? Number(next.dataset.token) - 1 : data.tokens.length - 1;
    const inside = (position) => first <= position && position <= last;
    const { keys, queries, sizes } = strongest[layer()] ?? { keys: [], queries: [], sizes: [] };
    const of = (ends, others) => sizes.map((size, k) => [others[k], size, ends[k]])
      .filter(([other, , end]) => inside(end) && !inside(other)).slice(0, 3);
    const from = of(queries, keys), to = of(keys, queries);
    current.classList.add("here");
    from.forEach(([position]) => elementOf(position).classList.add("from"));
    to.forEach(([position]) => elementOf(position).classList.add("to"));
    const words = (flows) => flows.length
      ? flows.map(([position, size]) => `${text(position)} ${size.toPrecision(2)} nats`).join(", ")
      : `none of the ${sizes.length} strongest flows between two tokens`;
    find(".detail").textContent =
      `${text(first)} reads from: ${words(from)}. It is read by: ${words(to)}.`;
  };
  const choose = (element) => {
    current = element;
    if (element.matches(".folded")) unfold(element.closest("li"));
    draw();
  };
  for (const token of tokens) token.addEventListener("pointerenter", () => choose(token));
  // A long part shows its last words, which stand before a label word, until all are asked for.
  // Pixels of a button, and of a word for which a line has no room.
  const opened = new Set(), LINES = 2, TAKEN = 180;
  const words = new Intl.Segmenter(undefined, { granularity: "word" });
  const widthOf = (token) => [...token.getClientRects()].reduce((sum, { width }) => sum + width, 0);
  const fold = (isWhole = false) => {
    for (const element of find(".rows").querySelectorAll(".folded")) element.classList.remove("folded");
    for (const button of find(".rows").querySelectorAll(".more")) button.remove();
    const most = (LINES + 0.5) * parseFloat(getComputedStyle(find(".rows")).lineHeight);
    const isLong = (row) => !isWhole && row.matches(".text") && row.offsetHeight > most;
    // All is measured before anything changes, or a page of hundreds of parts would be slow.
    const firsts = rows.filter(isLong).map((row) => {
      const of = [...row.querySelectorAll("[data-token]")];
      let first = of.length - 1, room = LINES * row.clientWidth - TAKEN - widthOf(of[first]);
      while (first > 0 && (room -= widthOf(of[first - 1])) >= 0) first -= 1;
      const begins = of.findIndex(({ textContent }, k) => k >= first && /^[\s↵]/.test(textContent));
      return [row, of, Math.max(first, begins)];
    });
    for (const [row, of, first] of firsts.filter(([, , first]) => first > 0)) {
      const button = document.createElement("button"), isOpen = opened.has(row);
      const hidden = of.slice(0, first).map(({ textContent }) => textContent).join("");
      const count = [...words.segment(hidden)].filter(({ isWordLike }) => isWordLike).length;
      button.type = "button";
      button.className = "more";
      button.setAttribute("aria-expanded", isOpen);
      button.setAttribute("aria-label",
        isOpen ? "fewer words" : `… ${count} more word${count === 1 ? "" : "s"}`);
      button.addEventListener("click", () => {
        opened[isOpen ? "delete" : "add"](row);
        fold();
        draw();
        row.querySelector(".more").focus();
      });
      row.prepend(button);
      for (const token of isOpen ? [] : of.slice(0, first)) token.classList.add("folded");
    }
  };
  const unfold = (row) => { opened.add(row); fold(); };
  return {
    arcs,
    lit: () => current?.closest("li"),
    title: () => [data.source, choice.value === "0" ? "all heads" : `head ${choice.value - 1}`],
    why: `shown first as it has the most flow ${data.ends}`,
    measure: `|A · ∂L/∂A| summed over all pairs of tokens, L is ${data.loss};`,
    unit: " nats",
    held: () => `The arcs of this layer${choice.value === "0" ? "" : " and head"} hold `
      + `${(100 * layers[layer()][choice.value].share).toFixed(0)} % of its saliency between tokens; `
      + "the rest flows inside parts, or in arcs too small to store.",
    stops: tokens,
    choose,
    show,
    fold,
  };
}
