// Bundles and receipts: steps that can be computed again, and steps that were.

const fileLink = (file) => el("a", { href: `file://${encodeURI(file.path).replace(/[?#]/g, encodeURIComponent)}` }, file.name);

function proofCells({ bundle, receipt }) {
  const agreed = receipt && !receipt.finding ? "agrees" : "";
  return [
    el("td", {}, bundle ? fileLink(bundle) : "–"),
    el("td", { class: "number" }, bundle && bundle.mib !== null ? `${number(bundle.mib)} MiB` : "–"),
    el("td", {}, bundle ? bundle.weights : "–"),
    el("td", { class: bundle && bundle.alarm ? "bad" : "" }, bundle && bundle.alarm ? bundle.alarm : "–"),
    el("td", {}, receipt ? fileLink(receipt) : "–"),
    el("td", { class: "number" }, receipt && receipt.trainer !== null ? number(receipt.trainer) : "–"),
    el("td", { class: "number" }, receipt && receipt.generation !== null ? number(receipt.generation) : "–"),
    el("td", { class: receipt && receipt.finding ? "bad" : "" }, receipt ? receipt.finding || agreed : "–"),
  ];
}

function proofsTable(run) {
  const names = ["step", "bundle", "size", "weights", "alarm", "receipt", "trainer differs by", "generator differs by", "finding"];
  const head = el("tr", {}, names.map((name) => el("th", {}, name)));
  const rows = run.proofs.map((proof) => el("tr", {}, el("td", { class: "number" }, String(proof.step)), proofCells(proof)));
  const first = run.proofs.find((proof) => proof.bundle);
  const commands = [`rlcore certify ${run.path}`, ...(first ? [`rlcore replay ${first.bundle.path}`] : [])];
  const title = el("p", {}, swatch(runColor(run.index)), `${run.label}: `, commands.map((command) => el("span", { class: "code" }, `${command}  `)));
  return el("div", { class: "card scroll" }, title, el("table", {}, head, rows));
}

const proofsPart = (runs) => el("div", {}, runs.filter((run) => run.proofs.length).map(proofsTable));
