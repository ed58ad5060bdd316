// The page, from the top down.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs.map((run, index) => ({ ...run, index }));
const state = { shown: new Set(runs.map((run) => run.index)), smoothing: 0 };
const redraw = [], resized = [];

function firstAndLast(run, name) {
  const curve = run.metrics[name];
  if (!curve || !curve.y.length) return "–";
  return curve.y.length > 1 ? `${number(curve.y[0])} → ${number(curve.y[curve.y.length - 1])}` : number(curve.y[0]);
}

const COLUMNS = [
  ["steps", (run) => number(Math.max(0, ...Object.values(run.metrics).map((curve) => curve.x[curve.x.length - 1] || 0)))],
  ["held-out pass@1", (run) => firstAndLast(run, "eval/pass@1")],
  ["held-out loss", (run) => firstAndLast(run, "eval/loss")],
  ["reward", (run) => firstAndLast(run, "reward_mean")],
  ["median s a step", (run) => number(run.medians["time/total_s"])],
  ["median tokens/s", (run) => number(run.medians.tokens_per_second)],
];

function summaryTable() {
  const columns = COLUMNS.filter(([, told]) => runs.some((run) => told(run) !== "–"));
  const head = el("tr", {}, el("th", {}, "run"), el("th", {}, "state"), columns.map(([name]) => el("th", { class: "number" }, name)));
  const rows = runs.map((run) => el("tr", {},
    el("td", { class: "run" }, swatch(runColor(run.index)), el("span", { title: run.path }, run.label)),
    el("td", { class: run.error ? "bad" : "", title: run.error || null }, run.state),
    columns.map(([name, told]) => el("td", { class: "number", "data-name": name }, told(run)))));
  const errors = runs.filter((run) => run.error).map((run) => el("p", { class: "bad text" }, `${run.label}: ${run.error}`));
  return el("div", { class: "card scroll" }, el("table", { class: "summary" }, head, rows), errors);
}

function controls() {
  const boxes = runs.length < 2 ? [] : runs.map((run) => el("label", { class: "name" }, el("input", { type: "checkbox", checked: "", on: { change: (event) => {
    if (event.target.checked) state.shown.add(run.index);
    else state.shown.delete(run.index);
    redraw.forEach((draw) => draw());
  } } }), swatch(runColor(run.index)), run.label));
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, on: { input: (event) => {
    state.smoothing = Number(event.target.value);
    redraw.forEach((draw) => draw());
  } } });
  return el("div", { class: "bar sticky" }, boxes, el("label", {}, "smoothing ", slider));
}

function curvesPart(section) {
  const grid = el("div", { class: "grid" });
  const draw = () => grid.replaceChildren(...section.metrics.map((name) => chart(name, runs, state)));
  redraw.push(draw);
  draw();
  return grid;
}

function show() {
  const header = document.getElementById("header"), main = document.getElementById("main");
  header.append(el("h1", {}, data.title), summaryTable());
  main.append(controls());
  for (const section of data.sections.filter((each) => each.open)) main.append(el("h2", {}, section.title), curvesPart(section));
  const timed = runs.filter((run) => run.time.steps.length || run.timeline.length);
  if (timed.length) main.append(el("h2", {}, "Seconds of a step"), el("div", { class: "wide" }, timed.map((run) => timeCard(run, data.phases))));
  const spreads = runs.flatMap((run) => run.spreads.map((spread) => spreadCard(run, spread)));
  if (spreads.length) main.append(el("h2", {}, "Rewards and lengths"), el("p", { class: "dim" }, "Median, 25 % to 75 % and 5 % to 95 % of the valid samples of each step that was kept."), el("div", { class: "grid" }, spreads));
  const counted = runs.filter((run) => run.failures);
  if (counted.length) main.append(...failuresPart(counted));
  if (runs.some((run) => run.samples.length)) main.append(el("h2", {}, "Samples"), samplesPart(runs));
  if (runs.some((run) => run.proofs.length)) main.append(el("h2", {}, "Bundles and receipts"), proofsPart(runs));
  main.append(recipesPart(runs, data.differences));
  for (const section of data.sections.filter((each) => !each.open)) main.append(closed(section.title, () => curvesPart(section)));
  main.append(el("p", { class: "dim" }, "Written by rlcore report. This file needs no network."));
}

show();
let lastWidth = wide();
window.addEventListener("resize", () => {
  if (wide() === lastWidth) return;
  lastWidth = wide();
  resized.forEach((draw) => draw());
});
