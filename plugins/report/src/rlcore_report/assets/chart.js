// One figure over the steps, a curve for each run that is shown.

const FRAME = { width: 400, height: 190, top: 8, right: 384, bottom: 166 };

const FEW = 25;

// The mean of the values so far, of which older ones count ever less (corrected for there being none before the first). Few
// values, such as those of evaluations, stay as they are.
function smoothed(values, weight) {
  if (!weight || values.length < FEW) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

const path = (xs, ys) => xs.map((x, index) => `${index ? "L" : "M"}${x.toFixed(1)},${ys[index].toFixed(1)}`).join("");

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

function curvePaths(curve, scale, weight, color) {
  const xs = curve.x.map(scale.across), smooth = smoothed(curve.y, weight);
  const drawn = [];
  if (smooth !== curve.y) drawn.push(svg("path", { class: "curve raw", stroke: color, d: path(xs, curve.y.map(scale.up)) }));
  drawn.push(svg("path", { class: "curve", stroke: color, d: path(xs, smooth.map(scale.up)) }));
  if (xs.length < FEW) {
    for (const [index, x] of xs.entries()) drawn.push(svg("circle", { cx: x, cy: scale.up(smooth[index]), r: 2.2, fill: color }));
  }
  return drawn;
}

function chart(name, runs, state) {
  const shown = runs.filter((run) => state.shown.has(run.index) && run.metrics[name]).map((run) => ({ run, curve: run.metrics[name] }));
  const card = el("section", { class: "card" }, el("h3", {}, name));
  if (!shown.length) return fill(card, {}, [el("div", { class: "dim" }, "in no run that is shown")]);
  const steps = shown.flatMap(({ curve }) => [...curve.x, ...curve.bad]);
  const scale = axes(FRAME, [Math.min(...steps), Math.max(Math.max(...steps), Math.min(...steps) + 1)], bounds(shown.flatMap(({ curve }) => curve.y)));
  const curves = shown.flatMap(({ run, curve }) => curvePaths(curve, scale, state.smoothing, runColor(run.index)));
  const bad = shown.flatMap(({ run, curve }) => curve.bad.map((step) =>
    svg("text", { x: scale.across(step), y: FRAME.top + 10, "text-anchor": "middle", class: "bad" }, "×",
      svg("title", {}, `step ${step} of ${run.label}: not finite`))));
  const cursor = svg("line", { class: "cursor", y1: FRAME.top, y2: FRAME.bottom, visibility: "hidden" });
  const drawing = svg("svg", { viewBox: `0 0 ${FRAME.width} ${FRAME.height}`, role: "img", "aria-label": name }, scale.parts, curves, bad, cursor);
  const readout = el("div", { class: "readout" });
  follow(drawing, cursor, readout, shown, scale, state);
  const numBad = shown.reduce((sum, { curve }) => sum + curve.bad.length, 0);
  const warning = numBad ? el("div", { class: "bad" }, `${numBad} steps are not finite (×)`) : null;
  return fill(card, {}, [drawing, readout, warning]);
}

// The values at the pointer, or the last ones where there is none.
function follow(drawing, cursor, readout, shown, scale, state) {
  const tell = (step) => {
    readout.replaceChildren(...shown.filter(({ curve }) => curve.x.length).map(({ run, curve }) => {
      const index = step === null ? curve.x.length - 1 : nearest(curve.x, step);
      const value = smoothed(curve.y, state.smoothing)[index];
      return el("span", {}, swatch(runColor(run.index)), `${curve.x[index]}: ${number(value, scale.span)}`);
    }));
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * FRAME.width;
    const steps = shown.flatMap(({ curve }) => curve.x.length ? [curve.x[nearest(curve.x, unscale(scale, x))]] : []);
    if (!steps.length) return;
    const step = steps.reduce((best, each) => (Math.abs(scale.across(each) - x) < Math.abs(scale.across(best) - x) ? each : best));
    fill(cursor, { x1: scale.across(step), x2: scale.across(step), visibility: "visible" }, []);
    tell(step);
  });
  drawing.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    tell(null);
  });
  tell(null);
}

function unscale(scale, x) {
  const zero = scale.across(0), one = scale.across(1);
  return (x - zero) / (one - zero);
}
