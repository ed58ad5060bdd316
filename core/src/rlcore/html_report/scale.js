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

// Bounds of some values with a little room; a single value gets room as well.
function bounds(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  const room = high > low ? 0.04 * (high - low) : Math.abs(high) * 0.05 || 0.5;
  return [low - room, high + room];
}

const linear = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);

function axes(frame, x, y) {
  const { left, top, right, bottom } = frame;
  const across = linear(x[0], x[1], left, right), up = linear(y[0], y[1], bottom, top);
  const parts = ticks(y[0], y[1], 4).map((value) => svg("g", {},
    svg("line", { class: "gridline", x1: left, x2: right, y1: up(value), y2: up(value) }),
    svg("text", { x: left - 6, y: up(value) + 4, "text-anchor": "end" }, number(value, y[1] - y[0]))));
  parts.push(...ticks(x[0], x[1], 6).filter(Number.isInteger).map((value) =>
    svg("text", { x: across(value), y: bottom + 16, "text-anchor": "middle" }, number(value))));
  return { across, up, parts, span: y[1] - y[0] };
}
