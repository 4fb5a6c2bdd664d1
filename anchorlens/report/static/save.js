"use strict";
// Saves a figure as SVG or PNG: each element with data-figure has a function toSvg, which gives the
// text of an SVG with width and height.
const svgNode = (name, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};
const textOfSvg = (svg) => new XMLSerializer().serializeToString(svg);

const download = (url, name) => {
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
};

// The style of each element, as it is on the page now, without which a file would be black.
const withStyles = (svg) => {
  const copy = svg.cloneNode(true), body = getComputedStyle(document.body);
  const copies = [copy, ...copy.querySelectorAll("*")];
  [svg, ...svg.querySelectorAll("*")].forEach((node, k) => {
    const style = getComputedStyle(node);
    for (const name of ["fill", "stroke", "stroke-width", "stroke-opacity", "font"])
      copies[k].style.setProperty(name, style.getPropertyValue(name));
  });
  const { width, height } = svg.viewBox.baseVal;
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  copy.prepend(svgNode("rect", { width, height, fill: body.backgroundColor }));
  return textOfSvg(copy);
};

const save = async (figure, kind) => {
  const svg = await figure.toSvg(), name = figure.dataset.figure;
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
