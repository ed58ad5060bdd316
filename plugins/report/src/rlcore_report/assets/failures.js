// How episodes ended.

const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);

function failuresCard(run) {
  const names = ["episodes", "trained", "masked", "asked again", "dropped", "mean reward", "|advantage|"];
  const head = el("tr", {}, el("th", {}, swatch(runColor(run.index)), run.label), names.map((name) => el("th", { class: "number" }, name)));
  const cells = (sums) => [sums.episodes, sums.trained, sums.masked, sums.asked_again, sums.dropped].map(number)
    .concat([sums.mean_reward === null ? "–" : number(sums.mean_reward), percent(sums.advantage_share)]);
  const row = (name, sums) => el("tr", {}, el("td", {}, name), cells(sums).map((text) => el("td", { class: "number" }, text)));
  const kinds = Object.entries(run.failures.kinds).map(([kind, sums]) => row(kind, sums));
  const reasons = run.failures.reasons.map((one) => row(`${one.kind}, ${one.outcome}: ${one.reason}`, one));
  return el("div", { class: "card scroll" }, el("table", {}, head, kinds), reasons.length ? closed("Reasons", () => el("table", {}, head.cloneNode(true), reasons)) : null);
}

function failuresPart(runs) {
  const told = "|advantage| is the mean over steps of the episodes' share of the sum of |advantage| over a step's loss tokens.";
  return [el("h2", {}, "How episodes ended"), el("p", { class: "dim" }, told), ...runs.map(failuresCard)];
}
