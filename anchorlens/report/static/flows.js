"use strict";
// Flows of one text: rows of its tokens, and arcs between rows in a layer. Which arcs there are, and
// what a choice of tokens shows, is a matter of the page of a prompt or of that of an answer.
const WIDEST = 12;  // pixels
const arcPath = (y1, y2, width) => {
  const long = Math.abs(y2 - y1);  // far ends bulge more, and never out of the picture
  const bulge = 1.3 * (0.08 + 0.9 * long / (long + 0.8 * width)) * width;
  return `M4,${y1} C${bulge},${y1} ${bulge},${y2} 10,${y2}`;
};
const HEAD = " m5,-4 l-6,4 l6,4";
const arcNode = ({ size, kind }, path, part, widest) => svgNode("path", { d: path, class: kind,
  "data-size": size, "stroke-width": widest * part, "stroke-opacity": (0.45 + 0.5 * part).toFixed(2) });
const shorter = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;

for (const root of document.querySelectorAll(".prompt")) {
  const data = JSON.parse(root.querySelector("script").textContent);
  const find = (selector) => root.querySelector(selector);
  const slider = find(".layer"), choice = find("select"), own = find(".own"), svg = find(".arcs");
  const rows = [...root.querySelectorAll(".rows > li")], picture = find(".picture");
  const tokens = [...root.querySelectorAll("[data-token]")];
  const layer = () => Number(slider.value);
  const elementOf = (position) =>  // a part of a character has no element of its own
    tokens.findLast((element) => Number(element.dataset.token) <= position);
  // The text of a character of several tokens is that of its element.
  const textOf = (position) => data.tokens[position] || elementOf(position)?.textContent || "";
  const text = (position) => `“${textOf(position).trim() || "␣"}” (${position})`;
  const page = { data, find, choice, rows, tokens, elementOf, layer, text, draw: () => draw() };
  const view = data.steps ? viewOfAnswer(page) : viewOfPrompt(page);
  const layers = data.names.map((_, k) => k);
  const largestOf = (arcs) => Math.max(0, ...arcs.map(({ size }) => Math.abs(size)));
  // One scale for all layers, unless a layer's own is wanted.
  const scale = () => largestOf(own.checked ? view.arcs(layer()) : layers.flatMap(view.arcs)) || 1;
  const name = ({ textContent }) => shorter(textContent.replace(/\s+/g, " ").trim() || "␣", 40);
  const label = ({ from, to, size }) =>
    `${name(from)} → ${name(to)}: ${size.toPrecision(3)}${view.unit}`;

  const title = () => {
    const layerName = /^\d+$/.test(data.names[layer()])
      ? `layer ${data.names[layer()]} of 0 to ${data.names.at(-1)}` : "all layers together";
    const [source, heads] = view.title();
    const first = layer() === data.start && view.why ? `, ${view.why}` : "";
    return [[source, layerName, heads].filter(Boolean).join(", ") + first,
      `Arcs: ${view.measure} up to ${scale().toPrecision(3)}${view.unit} `
        + `(${own.checked ? "scale of this layer alone" : "one scale for all layers"}${besides()})`];
  };
  // Prompts beside this one have other scales, or their arcs could not be seen.
  const besides = () => {
    const { largest, of } = root.closest("[data-largest]")?.dataset ?? {}, times = largest / scale();
    return !(times > 1.05) ? "" : `; in ${of} this width stands for ${times.toPrecision(2)} times as much`;
  };
  const middle = (element) => element.offsetTop + element.offsetHeight / 2;  // in the picture

  const drawArcs = () => {
    const height = find(".rows").scrollHeight, width = svg.clientWidth || 300, largest = scale();
    if (!height) return;
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const lit = view.lit();
    const drawn = view.arcs(layer()).filter(({ size }) => Math.abs(size) > largest / 200)
      .sort((a, b) => Math.abs(a.size) - Math.abs(b.size));
    svg.replaceChildren(...drawn.map((arc) => {
      const path = arcPath(middle(arc.from), middle(arc.to), width) + HEAD;
      const node = arcNode(arc, path, Math.abs(arc.size) / largest, WIDEST);
      if (lit) node.classList.add(lit === arc.from || lit === arc.to ? "lit" : "dim");
      node.append(svgNode("title", {}, label(arc)));
      node.addEventListener("pointerenter", () => { find(".detail").textContent = label(arc); });
      return node;
    }));
    return height;
  };

  const about = svg.getAttribute("aria-label");
  const thumbs = find(".thumbs"), SIZE = [26, 40];
  const drawThumbs = () => {
    const all = layers.map(view.arcs), largest = largestOf(all.flat()) || 1;
    const height = find(".rows").scrollHeight || 1;
    thumbs.replaceChildren(...all.map((arcs, k) => {
      const button = document.createElement("button");
      const small = svgNode("svg", { viewBox: `0 0 ${SIZE.join(" ")}` });
      small.append(...arcs.filter(({ size }) => Math.abs(size) > largest / 50).map((arc) => {
        const [y1, y2] = [arc.from, arc.to].map((end) => middle(end) / height * SIZE[1]);
        return arcNode(arc, arcPath(y1, y2, SIZE[0]), Math.abs(arc.size) / largest, 4);
      }));
      button.append(small, data.names[k]);
      button.type = "button";
      button.tabIndex = -1;  // the slider is for keys
      button.className = k === layer() ? "chosen" : "";
      button.addEventListener("click", () => { slider.value = k; changed(); });
      return button;
    }));
  };

  const draw = () => {
    const name = data.names[slider.value];
    find("output").textContent = name;
    slider.setAttribute("aria-valuetext", `layer ${name}`);
    [...thumbs.children].forEach((thumb, k) => thumb.classList.toggle("chosen", k === layer()));
    find(".title").replaceChildren(...title().map((line) => {
      const element = document.createElement("span");
      element.textContent = line;
      return element;
    }));
    drawArcs();
    const [source, heads] = view.title(), prompt = sourceOf(svg) ? source.split(", ").at(-1) : source;
    const arcs = view.arcs(layer()), widest = largestOf(arcs);
    const arc = arcs.find(({ size }) => Math.abs(size) === widest);
    svg.setAttribute("aria-label", `${about}, layer ${name}. ${arc ? `The widest: ${label(arc)}.` : "There is none."}`);
    svg.dataset.figure = [prompt || "flows", `layer ${name}`, heads].filter(Boolean).join(" ");
    find(".held").textContent = view.held();
    view.show();
  };

  // The picture as a file: rows of one line each, with its title.
  svg.toSvg = () => inLight(() => {
    const [width, left, line] = [860, 520, 17], styles = getComputedStyle(root), largest = scale();
    const color = (kind) => styles.getPropertyValue(`--${kind}`).trim();
    const ink = getComputedStyle(document.body), font = "13px sans-serif";
    const titles = [find(".heading").textContent, sourceOf(svg), ...title()].filter(Boolean)
      .flatMap((text, k) => linesOf(text, width - 24, k ? font : `bold ${font}`)
        .map((each) => [each, k ? "normal" : "bold"]));
    // A long part has its last two lines, as on the page.
    const texts = rows.map((row) => linesOf(row.textContent, left - 24, `bold ${font}`, 2));
    const heights = texts.map((lines) => line * lines.length + 7);
    const top = 38 + 19 * titles.length, height = top + heights.reduce((sum, each) => sum + each, 0) + 40;
    const tops = heights.map((_, k) => heights.slice(0, k).reduce((sum, each) => sum + each, top));
    const write = (x, y, text, more = {}) =>
      svgNode("text", { x, y, "font-family": "sans-serif", "font-size": 13, fill: ink.color, ...more }, text);
    const y = (element) => {
      const k = rows.indexOf(element.closest("li"));
      return tops[k] + heights[k] / 2;
    };
    const arcs = view.arcs(layer()).filter(({ from, to, size }) =>
      Math.abs(size) > largest / 200 && from !== to.closest("li"));
    const keys = [...root.querySelectorAll(".arc-keys span span")];
    return textOfSvg(svgNode("svg", { width, height, viewBox: `0 0 ${width} ${height}` },
      svgNode("rect", { width, height, fill: ink.backgroundColor }),
      ...titles.map(([text, weight], k) => write(12, 22 + 19 * k, text, { "font-weight": weight })),
      ...rows.flatMap((row, k) => texts[k].map((text, n) => write(12, tops[k] + 16 + line * n, text, {
        "font-weight": /label|target/.test(row.className) ? "bold" : "normal" }))),
      svgNode("g", { transform: `translate(${left} 0)`, fill: "none" }, ...arcs.map((arc) => {
        const path = arcPath(y(arc.from), y(arc.to), width - left) + HEAD;
        const node = arcNode(arc, path, Math.abs(arc.size) / largest, WIDEST);
        node.setAttribute("stroke", color(arc.kind));
        return node;
      })),
      ...keys.map((key, k) => write(12 + 230 * k, height - 14, `— ${key.parentElement.textContent}`,
        { fill: color(key.className.split(" ").at(-1).replace("-key", "")) }))));
  });

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

  // What is chosen stands in the address, so that a link or a reload shows the same.
  const id = root.closest("[id]")?.id;
  const changed = () => {
    draw();
    const state = new URLSearchParams({ layer: slider.value, choice: choice.value,
      ...(own.checked ? { own: 1 } : {}) });
    if (id && location.protocol !== "about:") history.replaceState(null, "", `#${id}?${state}`);
  };
  const restore = () => {
    const [of, state] = decodeURIComponent(location.hash.slice(1)).split("?");
    if (!id || of !== id) return;
    const chosen = new URLSearchParams(state);
    slider.value = chosen.get("layer") ?? slider.value;
    choice.value = chosen.get("choice") ?? choice.value;
    own.checked = chosen.has("own");
    root.dispatchEvent(new Event("chosen", { bubbles: true }));
    draw();
    if (state) root.scrollIntoView();
  };
  slider.addEventListener("input", changed);
  own.addEventListener("change", changed);
  choice.addEventListener("change", () => { changed(); drawThumbs(); });
  addEventListener("hashchange", restore);
  let seen = 0;
  new ResizeObserver(() => {
    if (!svg.clientWidth) return;  // it is not shown
    if (seen !== svg.clientWidth) view.fold?.();
    drawArcs();
    if (seen !== svg.clientWidth) drawThumbs();
    if (!seen) picture.scrollTop = picture.scrollHeight;  // the target is at the end
    seen = svg.clientWidth;
  }).observe(picture);
  // On paper all words are seen, in the width of other figures, and arcs end at their rows.
  const layOut = (width) => {
    picture.style.width = width;
    view.fold?.(Boolean(width));
    drawArcs();
  };
  addEventListener("beforeprint", () => layOut("680px"));
  addEventListener("afterprint", () => layOut(""));
  draw();
  restore();
}
