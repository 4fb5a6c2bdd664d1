"use strict";
// Saves a figure as SVG or PNG: each element with data-figure has a function toSvg, which gives the
// text of an SVG with width and height. A file is light, as paper is, also where the page is dark.
const svgNode = (name, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};
const textOfSvg = (svg) => new XMLSerializer().serializeToString(svg);

// Of which model and task something is, and the name of its file, which is that of no other.
const sourceOf = (element) => element.closest("[data-source]")?.dataset.source ?? "";
const fileName = (element, name) => `${sourceOf(element)} ${name}`
  .replace(/[^\p{L}\p{N}.]+/gu, "-").replace(/^-|-$/g, "");

const inLight = (draw) => {
  const { classList } = document.documentElement;
  classList.add("light");
  try {
    return draw();
  } finally {
    classList.remove("light");
  }
};

// A text in lines that are no wider than a number of pixels; of too many the last are kept.
const ruler = document.createElement("canvas").getContext("2d");
const linesOf = (text, width, font, most = Infinity) => {
  ruler.font = font;
  const fits = (line) => ruler.measureText(line).width <= width, lines = [""];
  for (const word of text.replace(/\s+/g, " ").trim().split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (fits(longer)) lines[lines.length - 1] = longer;
    else {
      if (lines.at(-1)) lines.push("");
      for (const letter of word)  // a word may be longer than a line, and some languages have no spaces
        if (fits(lines.at(-1) + letter)) lines[lines.length - 1] += letter;
        else lines.push(letter);
    }
  }
  if (lines.length <= most) return lines;
  let [first, ...others] = lines.slice(-most);
  while (first && !fits(`… ${first}`)) first = [...first].slice(1).join("");
  return [`… ${first}`, ...others];
};

const download = (url, name) => {
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
};

// The style of each element, without which a file would be black, and a title with a margin.
const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray",
  "stroke-linecap", "opacity", "font", "text-anchor", "dominant-baseline"];
const MARGIN = 16, TITLE = "bold 13px sans-serif", PLAIN = "11px sans-serif";
const withStyles = (svg) => inLight(() => {
  const copy = svg.cloneNode(true), body = getComputedStyle(document.body);
  const copies = copy.querySelectorAll("*");
  svg.querySelectorAll("*").forEach((node, k) => {
    const style = getComputedStyle(node);
    for (const name of STYLES) copies[k].style.setProperty(name, style.getPropertyValue(name));
  });
  // Texts may be wider here than where the page was made.
  const ends = [...svg.querySelectorAll("text")].map((text) => text.getBBox()).map((box) => box.x + box.width);
  const inner = Math.max(svg.viewBox.baseVal.width, ...ends), width = inner + 2 * MARGIN;
  const title = linesOf(svg.dataset.title ?? "", inner, TITLE);
  const texts = [...title.map((line) => [line, TITLE]), ...[sourceOf(svg), svg.dataset.note ?? ""]
    .flatMap((text) => linesOf(text, inner, PLAIN)).map((line) => [line, PLAIN])].filter(([line]) => line);
  const top = MARGIN + 17 * texts.length + (texts.length ? 8 : 0);
  const height = top + svg.viewBox.baseVal.height + MARGIN;
  return textOfSvg(svgNode("svg", { width, height, viewBox: `0 0 ${width} ${height}` },
    svgNode("rect", { width, height, fill: body.backgroundColor }),
    ...texts.map(([line, font], k) => svgNode("text", { x: MARGIN, y: MARGIN + 12 + 17 * k,
      style: `font: ${font}`, fill: body.color }, line)),
    svgNode("g", { transform: `translate(${MARGIN} ${top})` }, ...copy.childNodes)));
});

const save = async (figure, kind) => {
  const svg = await figure.toSvg(), name = fileName(figure, figure.dataset.figure);
  const url = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  if (kind === "svg") return download(url, `${name}.svg`);
  const image = new Image();
  image.src = url;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => download(URL.createObjectURL(blob), `${name}.png`));
};

for (const svg of document.querySelectorAll("svg[data-figure]")) svg.toSvg = () => withStyles(svg);
document.addEventListener("click", ({ target }) => {
  const button = target.closest("button[data-save]");
  const before = button?.closest("p").previousElementSibling;
  if (before) save(before.matches("[data-figure]") ? before : before.querySelector("[data-figure]"),
    button.dataset.save);
});
