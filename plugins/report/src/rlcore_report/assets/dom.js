// Elements. Texts are only ever set as text: what runs hold is never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (name === "color") node.style.backgroundColor = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);

const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

const swatch = (color) => el("span", { class: "swatch", color });

const runColor = (index) => `var(--run${index % 8})`;

const PHASE_COLORS = ["generation", "rewards", "logprobs", "train", "refit", "offload", "evaluation", "checkpoint", "other"];

// Calls of workers have the colour of the phase that they are a part of, as far as their names tell.
const CALLS = {
  train_step: "train", get_logprobs: "logprobs", generate: "generation", stream: "generation", save_state: "checkpoint", load_state: "checkpoint",
  export_weights: "refit", set_residency: "offload",
};

// Whatever else is timed has a colour of its own, in the order in which it is met.
const MORE_COLORS = ["var(--more0)", "var(--more1)", "var(--more2)", "var(--more3)"], met = [];

function phaseColor(name) {
  const phase = CALLS[name] || name;
  if (PHASE_COLORS.includes(phase)) return `var(--${phase})`;
  if (!met.includes(phase)) met.push(phase);
  return MORE_COLORS[met.indexOf(phase) % MORE_COLORS.length];
}

// Build what a closed part holds once it is opened.
function closed(title, build, open = false) {
  const details = el("details", {}, el("summary", {}, el("h2", {}, title)));
  const once = () => {
    if (details.open && details.children.length === 1) details.append(build());
  };
  details.addEventListener("toggle", once);
  details.open = open;
  once();
  return details;
}

function choice(labels, selected, changed) {
  const options = labels.map((label, index) => el("option", { value: index, selected: index === selected ? "" : null }, label));
  return el("select", { on: { change: (event) => changed(Number(event.target.value)) } }, options);
}
