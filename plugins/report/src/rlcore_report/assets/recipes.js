// What the runs were given.

function differencesTable(runs, differences) {
  const head = el("tr", {}, el("th", {}, "key"), runs.map((run) => el("th", {}, swatch(runColor(run.index)), run.label)));
  const rows = differences.map(([key, values]) => el("tr", {}, el("td", { class: "code" }, key), values.map((value) => el("td", { class: "code" }, value))));
  return el("div", { class: "card scroll" }, el("table", {}, head, rows));
}

function recipeTable(run) {
  const rows = Object.entries(run.recipe).map(([key, value]) => el("tr", {}, el("td", { class: "code" }, key), el("td", { class: "code" }, value)));
  return el("div", { class: "card scroll" }, el("table", {}, rows));
}

function recipesPart(runs, differences) {
  const part = el("div", {});
  if (runs.length > 1) {
    part.append(el("h2", {}, "What is different between the runs"));
    part.append(differences.length ? differencesTable(runs, differences) : el("p", { class: "dim" }, "Nothing: the recipes and versions are the same."));
  }
  for (const run of runs) part.append(closed(`Recipe of ${run.label}`, () => recipeTable(run)));
  return part;
}
