"use strict";
// Draws the figures, makes tables copyable as files, and follows the colours of the page.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 640px)");
  const config = { responsive: true, displayModeBar: false };
  const holders = [...document.querySelectorAll(".figure")];
  const texts = holders.map((holder) => holder.nextElementSibling.textContent);
  // Dark pages have the light blue where others have the dark one, as in the picture of a prompt.
  const swapped = { "#0072B2": "#56B4E9", "#56B4E9": "#0072B2" };
  const figureOf = (number, isDark) => JSON.parse(
    isDark ? texts[number].replace(/#0072B2|#56B4E9/g, (color) => swapped[color]) : texts[number]);

  const axisStyle = (isDark) => ({
    gridcolor: isDark ? "#3a434c" : "#e3e7eb", linecolor: isDark ? "#6b7680" : "#9aa4ae",
    zerolinecolor: isDark ? "#6b7680" : "#9aa4ae", automargin: true });
  const inLegend = (item) => item.showlegend ?? "name" in item;
  // A narrow figure has room for so many letters of a name in a line.
  const inLines = (name) => (name ?? "").replace(/(.{24,38}?)\s/g, "$1<br>");
  // Error bars have one colour in plotly, which dark pages hide.
  const dataOf = ({ data }, isDark, isNarrow) => data.map((trace, k) => ({ ...trace,
    ...(trace.error_y && trace.type === "bar"
      ? { error_y: { ...trace.error_y, color: isDark ? "#e6e9ec" : "#1c2024" } } : {}),
    // A narrow figure has one legend, with each name once.
    ...(isNarrow ? { legend: "legend", legendgroup: "", showlegend: inLegend(trace)
      && data.findIndex(({ name }) => name === trace.name) === k,
      ...(trace.name ? { name: inLines(trace.name) } : {}) } : {}) }));
  // Empty cells must not look like dark ones.
  const groundsOf = (data) => data.filter((trace) => trace.type === "heatmap").map((trace) => ({
    type: "rect", layer: "below", fillcolor: "#68727c", line: { width: 0 }, x0: 0, x1: 1, y0: 0, y1: 1,
    xref: `${trace.xaxis ?? "x"} domain`, yref: `${trace.yaxis ?? "y"} domain` }));
  const layoutOf = ({ data, layout }, isDark, isNarrow) => {
    const style = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      shapes: [...(layout.shapes ?? []).map((shape) => isNarrow ? { ...shape, legend: "legend" } : shape),
        ...(isDark ? groundsOf(data) : [])],
      font: { ...layout.font, family: "system-ui, sans-serif",
        color: isDark ? "#e6e9ec" : "#1c2024" } };
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key)))
      style[name] = { ...axisStyle(isDark), ...layout[name] };
    delete style.title;  // the heading of the section says it
    style.margin = { ...layout.margin, t: Math.max(20, (layout.margin?.t ?? 60) - 40) };
    style.hoverlabel = { bgcolor: isDark ? "#1e242a" : "#fff" };
    if (isNarrow) {  // the legend is below, one name in a line
      const names = new Set([...data, ...(layout.shapes ?? [])].filter(inLegend).map(({ name }) => name));
      const rows = [...names].flatMap((name) => inLines(name).split("<br>")).length;
      style.legend = { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom" };
      for (const name of Object.keys(style).filter((key) => /^legend\d+$/.test(key)))
        delete style[name];
      style.margin = { ...style.margin, l: 44, r: 8, b: 60 + 20 * rows };
    }
    return style;
  };
  const show = (number, isDark, isNarrow, size) => {
    const figure = figureOf(number, isDark), layout = layoutOf(figure, isDark, isNarrow);
    Plotly.react(holders[number], dataOf(figure, isDark, isNarrow), { ...layout, ...size }, config);
  };
  // A file has the title, which stands beside the figure on the page.
  holders.forEach((holder, number) => {
    holder.toSvg = async () => {
      const { data, layout } = figureOf(number, false);
      const width = Math.max(900, parseFloat(holder.style.minWidth));
      const title = linesOf(holder.dataset.title, width - 60, "17px system-ui, sans-serif");
      const below = [sourceOf(holder), holder.dataset.note]
        .flatMap((text) => linesOf(text, width - 60, "14px system-ui, sans-serif")).filter(Boolean);
      // A line of the title has room in any figure; each other line needs some more.
      const more = 20 * (title.length - 1) + (below.length ? 16 + 18 * below.length : 0);
      const top = { automargin: false, x: 0.01, y: 1, yref: "container", yanchor: "top", pad: { t: 16 } };
      const height = parseFloat(holder.style.height) + more;
      const drawn = { ...layoutOf({ data, layout }, false, false), width, height,
        title: { ...top, text: title.join("<br>"), subtitle: { text: below.join("<br>") } },
        margin: { ...layout.margin, t: (layout.margin?.t ?? 60) + more },
        paper_bgcolor: "#fff" };
      const url = await Plotly.toImage({ data: dataOf({ data }, false), layout: drawn },
        { format: "svg", width, height });
      return decodeURIComponent(url.slice(url.indexOf(",") + 1));
    };
  });
  const draw = (number) => show(number, dark.matches, narrow.matches, {});
  const drawAll = () => holders.forEach((_, number) => draw(number));
  // Paper has no scroll bars: all of a figure must fit between the margins of A4, and two on a page.
  const drawForPaper = () => holders.forEach((holder, number) => show(number, false, true,
    { width: 680, height: 0.8 * parseFloat(holder.style.height) }));
  // One figure a task, so that the page can be read while the others are drawn.
  holders.forEach((_, number) => setTimeout(() => draw(number), 0));
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  addEventListener("beforeprint", drawForPaper);
  addEventListener("afterprint", drawAll);

  // A phone shows the answer before a list of what follows.
  const contents = document.querySelector(".contents");
  contents.open = matchMedia("(min-width: 1100px)").matches;

  // Of several prompts one is shown.
  const choose = (id) => {
    const button = document.querySelector(`[data-shows="${id}"]`);
    for (const other of button?.closest("ul").querySelectorAll("button") ?? []) {
      other.setAttribute("aria-pressed", other === button);
      document.getElementById(other.dataset.shows).hidden = other !== button;
    }
  };
  for (const button of document.querySelectorAll("[data-shows]"))
    button.addEventListener("click", () => {
      choose(button.dataset.shows);
      history.replaceState(null, "", `#${button.dataset.shows}`);
    });
  document.addEventListener("chosen", ({ target }) => choose(target.closest("[id]").id));

  const cell = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  for (const button of document.querySelectorAll("button.download"))
    button.addEventListener("click", () => {
      const table = button.closest("details").querySelector("table");
      const lines = [...table.rows].map((row) =>
        [...row.cells].map((item) => cell(item.dataset.sort ?? item.textContent.trim())).join(","));
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
      link.download = `${fileName(button, button.dataset.name)}.csv`;
      link.click();
      URL.revokeObjectURL(link.href);
    });
})();
