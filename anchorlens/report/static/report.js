"use strict";
// Draws the figures, makes tables copyable as files, and follows the colours of the page.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 640px)");
  const config = { responsive: true, displaylogo: false,
    modeBarButtons: [["toImage", "resetScale2d"]] };
  const holders = [...document.querySelectorAll(".figure")];
  const figures = holders.map((holder) => JSON.parse(holder.nextElementSibling.textContent));

  const axisStyle = (isDark) => ({
    gridcolor: isDark ? "#3a434c" : "#e3e7eb", linecolor: isDark ? "#6b7680" : "#9aa4ae",
    zerolinecolor: isDark ? "#6b7680" : "#9aa4ae", automargin: true });
  const layoutOf = ({ data, layout }, isDark) => {
    const hasCells = data.some((trace) => trace.type === "heatmap");
    const style = { ...layout, paper_bgcolor: "rgba(0,0,0,0)",
      // Empty cells must not look like dark ones.
      plot_bgcolor: hasCells && isDark ? "#68727c" : "rgba(0,0,0,0)",
      font: { ...layout.font, family: "system-ui, sans-serif",
        color: isDark ? "#e6e9ec" : "#1c2024" } };
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key)))
      style[name] = { ...axisStyle(isDark), ...layout[name] };
    delete style.title;  // the heading of the section says it
    style.margin = { ...layout.margin, t: Math.max(20, (layout.margin?.t ?? 60) - 40) };
    style.hoverlabel = { bgcolor: isDark ? "#1e242a" : "#fff" };
    if (narrow.matches) {
      style.legend = { ...layout.legend, orientation: "h", x: 0, y: -0.18, yanchor: "top" };
      style.margin = { ...style.margin, l: 44, r: 8 };
    }
    return style;
  };
  const draw = (number, isDark = dark.matches) =>
    Plotly.react(holders[number], figures[number].data, layoutOf(figures[number], isDark), config);
  const drawAll = (isDark) => holders.forEach((_, number) => draw(number, isDark));
  // One figure a task, so that the page can be read while the others are drawn.
  holders.forEach((_, number) => setTimeout(() => draw(number), 0));
  dark.addEventListener("change", () => drawAll());
  narrow.addEventListener("change", () => drawAll());
  addEventListener("beforeprint", () => drawAll(false));
  addEventListener("afterprint", () => drawAll());

  const cell = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  for (const button of document.querySelectorAll("button.download"))
    button.addEventListener("click", () => {
      const table = button.closest("details").querySelector("table");
      const lines = [...table.rows].map((row) =>
        [...row.cells].map((item) => cell(item.textContent.trim())).join(","));
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
      link.download = button.dataset.name;
      link.click();
      URL.revokeObjectURL(link.href);
    });
})();
