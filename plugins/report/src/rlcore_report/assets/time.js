// Where the seconds of a step go: bands over the steps, and what was done when within one step.

const ROW = 22, SIDES = 64;

// As wide as the window lets a drawing be that stands alone in its row, so that a narrow one is not cut and its labels stay readable.
const wide = () => Math.max(320, Math.min(1000, document.documentElement.clientWidth - SIDES));

const barsFrame = () => ({ width: wide(), height: 190, top: 8, right: wide() - 16, bottom: 166 });

function legend(names) {
  return el("div", { class: "bar dim" }, names.map((name) => el("span", {}, swatch(phaseColor(name)), name)));
}

function bands(run, phases) {
  const { steps, num, values } = run.time;
  const heights = values.map((row) => row.reduce((sum, each) => sum + each, 0));
  const first = steps[0], last = steps[steps.length - 1] + num[num.length - 1];
  const frame = barsFrame();
  const scale = axes(frame, [first, last], [0, Math.max(...heights, 1e-9) * 1.04]);
  const bars = values.flatMap((row, index) => {
    const x = scale.across(steps[index]), end = index + 1 < steps.length ? steps[index + 1] : last;
    let below = 0;
    return row.map((seconds, phase) => {
      const top = scale.up(below + seconds), bottom = scale.up(below);
      below += seconds;
      if (bottom - top < 0.05) return null;
      const width = Math.max(0.6, scale.across(end) - x - 0.6);
      const of = num[index] > 1 ? `steps ${steps[index]} to ${end - 1}` : `step ${steps[index]}`;
      const told = svg("title", {}, `${of}: ${phases[phase]} ${number(seconds)} s of ${number(heights[index])} s`);
      const rect = svg("rect", { x, y: top, width, height: bottom - top }, told);
      rect.style.fill = phaseColor(phases[phase]);
      return rect;
    });
  });
  return svg("svg", { viewBox: `0 0 ${frame.width} ${frame.height}`, role: "img", "aria-label": "seconds of a step" }, scale.parts, bars);
}

function timelineOf(entry) {
  const roles = [...new Set(entry.spans.map(([role]) => role))].sort((one, other) =>
    (other === "driver") - (one === "driver") || one.localeCompare(other, "en", { numeric: true }));
  const end = Math.max(...entry.spans.map(([, , start, seconds]) => start + seconds), 1e-9);
  const width = wide();
  const frame = { left: 8 + Math.max(...roles.map(widthOf)), right: width - 16, top: 4, bottom: 4 + ROW * roles.length };
  const across = linear(0, end, frame.left, frame.right);
  const marks = ticks(0, end, Math.ceil(width / 125)).map((value) => svg("g", {},
    svg("line", { class: "gridline", x1: across(value), x2: across(value), y1: frame.top, y2: frame.bottom }),
    below(across(value), frame.bottom + 15, `${number(value)} s`, width)));
  const rows = roles.map((role, index) => svg("text", { x: 0, y: frame.top + ROW * index + 15 }, role));
  const spans = entry.spans.map(([role, name, start, seconds]) => {
    const y = frame.top + ROW * roles.indexOf(role) + 3;
    const rect = svg("rect", { x: across(start), y, width: Math.max(1, across(start + seconds) - across(start) - 0.5), height: ROW - 6, rx: 2 },
      svg("title", {}, `${role}: ${name}, ${number(seconds)} s from ${number(start)} s on`));
    rect.style.fill = phaseColor(name);
    return rect;
  });
  return svg("svg", { viewBox: `0 0 ${width} ${frame.bottom + 22}`, role: "img", "aria-label": "timeline" }, marks, rows, spans);
}

function timeCard(run, phases) {
  const card = el("section", { class: "card" }, el("h3", {}, swatch(runColor(run.index)), run.label));
  const inTimeline = new Set(run.timeline.flatMap(({ spans }) => spans.map(([, name]) => CALLS[name] || name)));
  const used = phases.filter((name, index) => inTimeline.has(name) || run.time.values.some((row) => row[index] > 0));
  const others = [...inTimeline].filter((name) => !phases.includes(name));
  if (run.time.steps.length) {
    const place = el("div"), draw = () => place.replaceChildren(bands(run, phases));
    card.append(place, legend([...used, ...others]));
    resized.push(draw);
    draw();
  }
  if (run.timeline.length) {
    const place = el("div");
    let shown = run.timeline.length - 1;
    const draw = () => place.replaceChildren(timelineOf(run.timeline[shown]));
    const show = (index) => {
      shown = index;
      draw();
    };
    card.append(el("div", { class: "bar" }, el("label", {}, "timeline of ", choice(run.timeline.map(({ step }) => `step ${step}`), shown, show))), place);
    resized.push(draw);
    draw();
  }
  return card;
}
