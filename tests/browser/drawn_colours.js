// The colours with which the marks of a page are drawn, each as [red, green, blue, opacity]: of every
// figure with the name and the axes of its traces, and of the pictures of a prompt and of the claims.
async () => {
  const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const read = (color) => {
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = color;
    pixel.fillRect(0, 0, 1, 1);
    const [red, green, blue, opacity] = pixel.getImageData(0, 0, 1, 1).data;
    return [red, green, blue, opacity / 255];
  };
  // Of a pattern the ground, or the lines if there is none, or one that nobody sees.
  const paintOf = (element, name) => {
    const style = getComputedStyle(element), paint = style[name];
    if (paint === "none" || (name === "stroke" && style.strokeWidth === "0px")) return null;
    let color, hatch = "";
    const id = paint.match(/^url\(["']?#([^"')]+)/)?.[1];
    if (id) {
      const parts = [...document.getElementById(id).children];
      const isGround = (part) => part.tagName === "rect" && getComputedStyle(part).fillOpacity !== "0";
      const first = parts.find(isGround) ?? parts.find(({ tagName }) => tagName !== "rect");
      const own = getComputedStyle(first), part = own.stroke === "none" ? "fill" : "stroke";
      color = read(own[part]);
      color[3] *= own[`${part}Opacity`];
      hatch = parts.map((each) => each.getAttribute("d") ?? each.tagName).join();
    } else color = read(paint);
    color[3] *= style[`${name}Opacity`];
    for (let at = element; at instanceof SVGElement; at = at.parentElement)
      color[3] *= getComputedStyle(at).opacity;
    // What tells marks of one colour apart.
    return { color, form: [hatch, style.strokeDasharray, element.matches(".point") && element.getAttribute("d")] };
  };
  const marks = (root, kinds) => Object.entries(kinds).flatMap(([kind, [selector, name]]) =>
    [...root.querySelectorAll(selector)].map((element) => ({ kind, ...paintOf(element, name), element }))
      .filter(({ color }) => color));
  const OF_PLOTS = { line: ["path.js-line", "stroke"], point: [".points path.point", "fill"],
    band: ["path.js-fill", "fill"], bar: [".barlayer .point path", "fill"],
    interval: [".errorbar path", "stroke"], limit: [".shapelayer path", "stroke"] };
  const inPlot = ({ element, kind, ...mark }) => {
    const trace = element.closest(".trace")?.__data__?.[0].trace;
    if (!trace) return { ...mark, kind, trace: -1, name: "", axes: "" };  // in the legend
    return { ...mark, kind: kind === "line" && trace.fill !== "none" ? "outline" : kind,
      trace: trace.index, name: trace.name, axes: `${trace.xaxis} ${trace.yaxis}` };
  };
  // The different colours of the cells of a heat map, which is a bitmap.
  const cellsOf = async (image) => {
    const bitmap = new Image(), href = image.href.baseVal;
    bitmap.src = href;
    await bitmap.decode();
    const canvas = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d");
    canvas.drawImage(bitmap, 0, 0);
    const { data } = canvas.getImageData(0, 0, bitmap.width, bitmap.height);
    const colors = new Set(new Uint32Array(data.buffer));
    return [...colors].map((color) => [0, 8, 16, 24].map((shift) => (color >>> shift) & 255))
      .filter(([, , , opacity]) => opacity).map(([...color]) => [...color.slice(0, 3), color[3] / 255]);
  };
  const plots = [...document.querySelectorAll(".js-plotly-plot")].map(async (figure) => ({
    name: figure.dataset.figure,
    marks: marks(figure, OF_PLOTS).map(inPlot),
    cells: await Promise.all([...figure.querySelectorAll(".heatmaplayer image")].map(cellsOf)),
  }));
  const pictures = [
    ...marks(document, { arc: [".arcs path", "stroke"], thumb: [".thumbs path", "stroke"],
      "interval of a claim": [".forest path", "stroke"], "number of a claim": [".forest circle", "fill"],
      "limit of a claim": [".forest line", "stroke"] }),
  ].map(({ element, ...mark }) => mark);
  return { ground: read(getComputedStyle(document.body).backgroundColor), plots: await Promise.all(plots), pictures };
}
