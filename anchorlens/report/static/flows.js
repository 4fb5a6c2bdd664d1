"use strict";
// Flows of one text: its tokens, and arcs between its parts in a layer. What a choice of tokens shows
// is a matter of the page of a prompt or of that of an answer.
for (const root of document.querySelectorAll(".prompt")) {
  const data = JSON.parse(root.querySelector("script").textContent);
  const find = (selector) => root.querySelector(selector);
  const slider = find(".layer"), choice = find("select"), play = find(".play");
  const list = find(".rows"), svg = find("svg"), held = find(".held");
  const tokens = [...root.querySelectorAll(".al-tokens [data-token]")];
  const elementOf = (position) =>  // a part of a character has no element of its own
    tokens.findLast((element) => Number(element.dataset.token) <= position);
  const ROW = 26, open = new Set();
  const flows = () => data.layers[slider.value][choice.value];
  // The text of a character of several tokens is that of its element.
  const textOf = (position) => data.tokens[position] || elementOf(position)?.textContent || "";
  const text = (position) => `“${textOf(position).trim() || "␣"}” (${position})`;
  const page = { data, find, choice, tokens, elementOf, flows, text, draw: () => draw() };
  const view = data.steps ? viewOfAnswer(page) : viewOfPrompt(page);

  // The rows of the arc picture: a part of the prompt, or each of its tokens if it is open.
  const visibleRows = () => view.parts().flatMap(([first, last, kind, label], part) => {
    const row = { first, last, kind, label, part };
    if (!open.has(part)) return [row];
    const inside = Array.from({ length: last - first + 1 }, (_, k) => ({
      first: first + k, last: first + k, kind, label: textOf(first + k), part, token: true }));
    return [{ ...row, last: first - 1 }, ...inside];
  });

  const drawRows = (rows) => list.replaceChildren(...rows.map((row) => {
    const item = document.createElement("li");
    const [first, last] = view.parts()[row.part];
    const folds = !row.token && first < last;
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
    const { keys, sizes } = flows(), queries = view.queries();
    sizes.forEach((size, k) => {
      const [from, to] = [rowOf[keys[k]], rowOf[queries[k]]];
      const pair = from * rows.length + to;
      if (from !== to) sums.set(pair, (sums.get(pair) ?? 0) + size);
    });
    return [...sums].map(([pair, size]) =>
      [Math.floor(pair / rows.length), pair % rows.length, size]);
  };

  const drawArcs = (rows) => {
    const arcs = arcsOf(rows).sort((a, b) => Math.abs(a[2]) - Math.abs(b[2]));
    const width = svg.clientWidth || 300, largest = Math.abs(arcs.at(-1)?.[2] ?? 1);
    svg.setAttribute("height", rows.length * ROW);
    svg.setAttribute("viewBox", `0 0 ${width} ${rows.length * ROW}`);  // paper is narrower
    const wide = arcs.filter(([, , size]) => Math.abs(size) > largest / 100);
    svg.replaceChildren(...wide.map(([from, to, size]) => {
      const [y1, y2] = [(from + 0.5) * ROW, (to + 0.5) * ROW], part = Math.abs(size) / largest;
      const bulge = Math.min(width - 8, 24 + (y2 - y1) * 0.9) * 1.3;
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", `M4,${y1} C${bulge},${y1} ${bulge},${y2} 10,${y2} m5,-4 l-6,4 l6,4`);
      path.setAttribute("class", view.kindOf(rows[from], rows[to], size));
      path.setAttribute("stroke-width", (0.6 + 6 * part).toFixed(2));
      path.setAttribute("stroke-opacity", (0.2 + 0.75 * part).toFixed(2));
      const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
      title.textContent = `${rows[from].label} → ${rows[to].label}: ${size.toPrecision(3)}${view.unit}`;
      path.append(title);
      return path;
    }));
  };

  const draw = () => {
    const rows = visibleRows();
    const name = data.names[slider.value];
    find("output").textContent = name;
    slider.setAttribute("aria-valuetext", `layer ${name}`);
    drawRows(rows);
    drawArcs(rows);
    held.textContent = view.held();
    view.show();
  };

  view.stops.forEach((element, k, stops) => {
    element.tabIndex = k ? -1 : 0;
    element.addEventListener("focus", () => view.choose(element));
    element.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const next = event.key === "Home" ? stops[0] : event.key === "End" ? stops.at(-1)
        : step && stops[k + step];
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
  choice.addEventListener("change", draw);
  new ResizeObserver(() => drawArcs(visibleRows())).observe(svg);
  draw();
}
