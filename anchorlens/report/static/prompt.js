"use strict";
// One prompt: flows of the token that is pointed at, and arcs between the parts of the prompt.
for (const root of document.querySelectorAll(".prompt")) {
  const data = JSON.parse(root.querySelector("script").textContent);
  const find = (selector) => root.querySelector(selector);
  const slider = find(".layer"), heads = find(".heads"), play = find(".play");
  const list = find(".rows"), svg = find("svg"), detail = find(".detail"), held = find(".held");
  const tokens = [...root.querySelectorAll(".al-tokens [data-token]")];
  const elementOf = (position) =>  // a part of a character has no element of its own
    tokens.findLast((element) => Number(element.dataset.token) <= position);
  const ROW = 26, open = new Set();
  const flows = () => data.layers[slider.value][heads.value];
  // The text of a character of several tokens is that of its element.
  const textOf = (position) => data.tokens[position] || elementOf(position)?.textContent || "";
  const text = (position) => `“${textOf(position).trim() || "␣"}” (${position})`;

  // The rows of the arc picture: a part of the prompt, or each of its tokens if it is open.
  const visibleRows = () => data.rows.flatMap(([first, last, kind, label], part) => {
    const row = { first, last, kind, label, part };
    if (!open.has(part)) return [row];
    const inside = Array.from({ length: last - first + 1 }, (_, k) => ({
      first: first + k, last: first + k, kind, label: textOf(first + k), part, token: true }));
    return [{ ...row, last: first - 1 }, ...inside];
  });

  const drawRows = (rows) => list.replaceChildren(...rows.map((row) => {
    const item = document.createElement("li");
    const folds = !row.token && data.rows[row.part][0] < data.rows[row.part][1];
    const shown = document.createElement(folds ? "button" : "span");
    shown.textContent = row.label.replaceAll("\n", "↵");
    shown.className = `${row.kind}${row.token ? " token" : ""}`;
    if (folds) {
      shown.type = "button";
      shown.setAttribute("aria-expanded", open.has(row.part));
      shown.addEventListener("click", () => {
        open.has(row.part) ? open.delete(row.part) : open.add(row.part);
        draw();
        list.querySelectorAll("li")[rows.findIndex((r) => r.part === row.part)]
          ?.querySelector("button")?.focus();
      });
    }
    item.append(shown);
    return item;
  }));

  const arcsOf = (rows) => {
    const rowOf = [];
    rows.forEach((row, k) => { for (let p = row.first; p <= row.last; p++) rowOf[p] = k; });
    const sums = new Map();
    const { keys, queries, sizes } = flows();
    sizes.forEach((size, k) => {
      const [from, to] = [rowOf[keys[k]], rowOf[queries[k]]];
      if (from !== to) sums.set(from * 1e4 + to, (sums.get(from * 1e4 + to) ?? 0) + size);
    });
    return [...sums].map(([pair, size]) => [Math.floor(pair / 1e4), pair % 1e4, size]);
  };

  const drawArcs = (rows) => {
    const arcs = arcsOf(rows).sort((a, b) => a[2] - b[2]);
    const width = svg.clientWidth || 300, largest = arcs.at(-1)?.[2] ?? 1;
    svg.setAttribute("height", rows.length * ROW);
    svg.setAttribute("viewBox", `0 0 ${width} ${rows.length * ROW}`);  // paper is narrower
    svg.replaceChildren(...arcs.filter(([, , size]) => size > largest / 100).map(([from, to, size]) => {
      const [y1, y2] = [(from + 0.5) * ROW, (to + 0.5) * ROW], part = size / largest;
      const bulge = Math.min(width - 8, 24 + (y2 - y1) * 0.9) * 1.3;
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", `M4,${y1} C${bulge},${y1} ${bulge},${y2} 10,${y2} m5,-4 l-6,4 l6,4`);
      const intoTarget = rows[to].kind === "target" && rows[from].kind === "label";
      path.setAttribute("class", intoTarget ? "out" : rows[to].kind === "label" ? "into" : "other");
      path.setAttribute("stroke-width", (0.6 + 6 * part).toFixed(2));
      path.setAttribute("stroke-opacity", (0.2 + 0.75 * part).toFixed(2));
      const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
      title.textContent = `${rows[from].label} → ${rows[to].label}: ${size.toPrecision(3)} nats`;
      path.append(title);
      return path;
    }));
  };

  const draw = () => {
    const rows = visibleRows();
    find("output").textContent = slider.value;
    slider.setAttribute("aria-valuetext", `layer ${slider.value}`);
    drawRows(rows);
    drawArcs(rows);
    const { sizes, share } = flows();
    held.textContent = `Drawn from the ${sizes.length} strongest flows between two tokens, which `
      + `hold ${(100 * share).toFixed(0)} % of the saliency between two tokens in this layer`
      + `${heads.value === "0" ? "" : " and head"}. Wider and darker is more.`;
    if (current !== null) show(current);
  };

  let current = null;
  const show = (element) => {
    for (const token of tokens) token.classList.remove("from", "to", "here");
    current = element;
    if (element === null) return;
    const next = tokens[tokens.indexOf(element) + 1];
    const first = Number(element.dataset.token);
    const last = next ? Number(next.dataset.token) - 1 : data.tokens.length - 1;
    const inside = (position) => first <= position && position <= last;
    const { keys, queries, sizes } = flows();
    const strongest = (ends, others) => sizes.map((size, k) => [size, k])
      .filter(([, k]) => inside(ends[k]) && !inside(others[k]))
      .sort((a, b) => b[0] - a[0]).slice(0, 3).map(([size, k]) => [others[k], size]);
    const from = strongest(queries, keys), to = strongest(keys, queries);
    element.classList.add("here");
    from.forEach(([position]) => elementOf(position).classList.add("from"));
    to.forEach(([position]) => elementOf(position).classList.add("to"));
    const words = (flows) => flows.length
      ? flows.map(([position, size]) => `${text(position)} ${size.toPrecision(2)}`).join(", ")
      : "none of the strongest flows";
    detail.textContent = `${text(first)} reads from: ${words(from)}. It is read by: ${words(to)}.`;
  };

  tokens.forEach((element, k) => {
    element.tabIndex = k ? -1 : 0;
    element.addEventListener("pointerenter", () => show(element));
    element.addEventListener("focus", () => show(element));
    element.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const next = event.key === "Home" ? tokens[0] : event.key === "End" ? tokens.at(-1)
        : step && tokens[k + step];
      if (!next) return;
      event.preventDefault();
      element.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  });

  let timer = null;
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
    play.setAttribute("aria-pressed", "false");
  };
  play.addEventListener("click", () => {
    if (timer !== null) return stop();
    play.textContent = "Stop";
    play.setAttribute("aria-pressed", "true");
    timer = setInterval(() => {
      slider.value = (Number(slider.value) + 1) % data.layers.length;
      draw();
    }, 900);
  });
  slider.addEventListener("input", () => { stop(); draw(); });
  heads.addEventListener("change", draw);
  new ResizeObserver(() => drawArcs(visibleRows())).observe(svg);
  draw();
}
