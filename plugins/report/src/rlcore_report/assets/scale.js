// Numbers on an axis.

// Four digits, or as many more as tell values apart that lie `span` from each other.
function number(value, span = Infinity) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  const digits = Math.min(12, Math.max(size >= 1000 ? 5 : 4, 3 + Math.floor(Math.log10(size / span))));
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(digits)));
}

function ticks(low, high, most) {
  const span = high - low || 1;
  const power = 10 ** Math.floor(Math.log10(span / most));
  const stride = [1, 2, 5, 10].map((factor) => factor * power).find((each) => span / each <= most);
  const found = [];
  for (let index = Math.ceil(low / stride - 1e-9); index * stride <= high + stride * 1e-9; index++) found.push(index * stride);
  return found.map((value) => Number(value.toPrecision(12)));
}

// Bounds of some values with a little room; a single value gets room as well. Where no value is negative, or above 1, no bound is.
function bounds(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  const room = high > low ? 0.04 * (high - low) : Math.abs(high) * 0.05 || 1;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high <= 1 ? Math.min(1, high + room) : high + room];
}

const linear = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);

const DIGIT = 6.6;

// Pixels that a label takes at most, in the size of an axis.
const widthOf = (label) => DIGIT * label.length;

// A label below an axis, moved where it would leave the drawing.
function below(x, y, label, width) {
  const half = widthOf(label) / 2;
  return svg("text", { x: Math.max(half, Math.min(width - half, x)), y, "text-anchor": "middle" }, label);
}

// The labels of the values decide how much room is left of the axis.
function axes(frame, x, y) {
  const { width, top, right, bottom } = frame;
  const values = ticks(y[0], y[1], 4).map((value) => [value, number(value, y[1] - y[0])]);
  const left = 10 + Math.max(2 * DIGIT, ...values.map(([, label]) => widthOf(label)));
  const across = linear(x[0], x[1], left, right), up = linear(y[0], y[1], bottom, top);
  const parts = values.map(([value, label]) => svg("g", {},
    svg("line", { class: "gridline", x1: left, x2: right, y1: up(value), y2: up(value) }),
    svg("text", { x: left - 6, y: up(value) + 4, "text-anchor": "end" }, label)));
  parts.push(...ticks(x[0], x[1], 6).filter(Number.isInteger).map((value) => below(across(value), bottom + 16, number(value), width)));
  return { across, up, parts, span: y[1] - y[0] };
}
