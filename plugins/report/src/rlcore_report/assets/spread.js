// How rewards and lengths spread over a step's samples: quantiles over the steps, and bins of one step.

const HISTOGRAM = { width: 400, height: 130, top: 6, right: 384, bottom: 108 };

function fan(spread, color) {
  const steps = spread.steps;
  const scale = axes(FRAME, [steps[0], Math.max(steps[steps.length - 1], steps[0] + 1)], bounds(spread.quantiles.flat()));
  const of = (index) => spread.quantiles.map((row) => scale.up(row[index]));
  const xs = steps.map(scale.across);
  const area = (low, high, opacity) => {
    const back = path([...xs].reverse(), of(high).reverse()).replace("M", "L");
    const band = svg("path", { d: `${path(xs, of(low))}${back}Z`, "fill-opacity": opacity });
    band.style.fill = color;
    return band;
  };
  const middle = svg("path", { class: "curve", stroke: color, d: path(xs, of(2)) });
  const told = steps.map((step, index) => {
    const [least, low, median, high, most] = spread.quantiles[index].map((value) => number(value));
    return svg("circle", { cx: xs[index], cy: scale.up(spread.quantiles[index][2]), r: 2.2, fill: color },
      svg("title", {}, `step ${step}: median ${median}; 25 % to 75 % ${low} to ${high}; 5 % to 95 % ${least} to ${most}`));
  });
  return svg("svg", { viewBox: `0 0 ${FRAME.width} ${FRAME.height}`, role: "img", "aria-label": spread.label }, scale.parts, area(0, 4, 0.15), area(1, 3, 0.3), middle, told);
}

function histogram(spread, index, color) {
  const counts = spread.counts[index], width = (spread.high - spread.low) / counts.length;
  const scale = axes(HISTOGRAM, [spread.low, spread.high], [0, Math.max(...counts, 1) * 1.05]);
  const bars = counts.map((count, bin) => {
    const low = spread.low + bin * width, x = scale.across(low);
    const rect = svg("rect", { x: x + 0.5, y: scale.up(count), width: scale.across(low + width) - x - 1, height: scale.up(0) - scale.up(count) },
      svg("title", {}, `${number(low)} to ${number(low + width)}: ${count} samples`));
    rect.style.fill = color;
    return rect;
  });
  const ends = ticks(spread.low, spread.high, 6).map((value) => below(scale.across(value), HISTOGRAM.bottom + 16, number(value), HISTOGRAM.width));
  const lines = scale.parts.filter((part) => part.tagName === "g");
  return svg("svg", { viewBox: `0 0 ${HISTOGRAM.width} ${HISTOGRAM.height}`, role: "img", "aria-label": "samples of a step" }, lines, bars, ends);
}

function spreadCard(run, spread) {
  const color = runColor(run.index), last = spread.steps.length - 1;
  const place = el("div"), told = el("span", { class: "dim" });
  const show = (index) => {
    told.textContent = `samples of step ${spread.steps[index]}`;
    place.replaceChildren(histogram(spread, index, color));
  };
  const slider = el("input", { type: "range", min: 0, max: last, value: last, "aria-label": "step", on: { input: (event) => show(Number(event.target.value)) } });
  show(last);
  const heading = el("h3", {}, swatch(color), `${run.label}: ${spread.label}`);
  return el("section", { class: "card" }, heading, fan(spread, color), el("div", { class: "bar" }, slider, told), place);
}
