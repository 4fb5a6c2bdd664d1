"use strict";
// The page of an answer: what the chosen token reads, as bars below the tokens and as numbers.
function viewOfAnswer({ data, find, choice, rows, tokens, elementOf, layer, text, draw }) {
  const MOST_ROWS = 8;
  const elements = data.steps.map(({ position }) => elementOf(position));
  const stops = [...new Set(elements)];
  const flows = () => data.layers[layer()][choice.value];
  const step = () => data.steps[choice.value];
  const percent = (share) => share && share < 0.001 ? `${(100 * share).toPrecision(1)} %`
    : `${(100 * share).toFixed(1)} %`;

  const drawBars = () => {
    const sums = new Map();  // an element may have several tokens
    const { keys, sizes } = flows();
    keys.forEach((key, k) => {
      const element = elementOf(key);
      sums.set(element, (sums.get(element) ?? 0) + sizes[k]);
    });
    const largest = Math.max(...[...sums.values()].map(Math.abs));
    for (const token of tokens) {
      const size = sums.get(token) ?? 0;
      token.classList.toggle("below-0", size < 0);
      token.style.setProperty("--weight", size ? Math.abs(size) / largest : 0);
      size ? token.dataset.weight = size.toPrecision(3) : delete token.dataset.weight;
    }
  };

  const row = (name, ...numbers) => {
    const line = document.createElement("tr"), head = document.createElement("th");
    head.scope = "row";
    head.textContent = name;
    line.append(head, ...numbers.map((number) => {
      const cell = document.createElement("td");
      cell.textContent = number;
      return cell;
    }));
    return line;
  };

  let shown = null;
  const show = () => {
    const { position, loss } = step(), { keys, sizes, share, shares, means } = flows();
    const here = elements[choice.value], box = find(".picture");
    for (const stop of stops) {
      stop.classList.toggle("here", stop === here);
      stop.tabIndex = stop === here ? 0 : -1;
    }
    if (here !== shown) box.scrollTop = here.offsetTop - 0.7 * box.clientHeight;
    shown = here;
    drawBars();
    find(".detail").textContent = `${text(position)} has the probability `
      + `${percent(Math.exp(-loss))}, a loss of ${loss.toPrecision(3)} nats.`;
    find(".segments tbody").querySelectorAll("tr").forEach((line, k) => {
      line.cells[1].textContent = means[k] === null ? "–" : percent(shares[k]);
      line.cells[2].textContent = means[k] === null ? "–" : means[k].toPrecision(3);
    });
    const total = sizes.reduce((sum, size) => sum + Math.abs(size), 0) / share;
    find(".sources tbody").replaceChildren(...sizes.slice(0, MOST_ROWS).map((size, k) =>
      row(text(keys[k]), percent(Math.abs(size) / total), size.toPrecision(3))));
  };

  for (const stop of stops) {
    stop.classList.add("step");
    stop.addEventListener("click", () => stop.focus());
  }
  return {
    // From the runs of tokens before the chosen one; those of its own run are among the bars.
    arcs: (layer) => {
      const to = elements[choice.value], { runs } = data.layers[layer][choice.value];
      return runs.map((size, k) => ({ size, from: rows[k], to, kind: size < 0 ? "into" : "out" }))
        .filter(({ size, from }) => size && from !== to.closest("li"));
    },
    lit: () => null,
    title: () => ["", ""],
    measure: "the sum of the weights",
    unit: "",
    held: () => `The bars are the ${flows().keys.length} strongest of the ${step().position - 1} tokens `
      + `before the position that predicts this one. They hold ${percent(flows().share)} of what is read.`,
    stops,
    choose: (element) => {
      if (elements[choice.value] === element) return;
      choice.value = elements.indexOf(element);
      draw();
    },
    show,
  };
}
