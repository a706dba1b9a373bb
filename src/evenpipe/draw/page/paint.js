// Draws what can be seen of a scene, and nothing else. A redraw costs as much as the picture has pixels: where passes
// are narrower than a few pixels their row is one strip of mean colours (shades.js), however many they are.

const WIDE = 4; // from this mean width on, in pixels, passes are boxes

class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.strips = new Strips();
  }

  resize(width, height) {
    this.scale = window.devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    this.canvas.width = Math.round(width * this.scale);
    this.canvas.height = Math.round(height * this.scale);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
  }

  // Returns how much was drawn: rectangles, texts, strips.
  draw(scene) {
    this.drawn = { rectangles: 0, texts: 0, strips: 0 };
    this.pending = [];
    const { context } = this;
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.fillStyle = scene.theme.ground;
    context.fillRect(0, 0, this.width, this.height);
    for (const box of scene.boxes) this.box(scene, box);
    for (const box of scene.boxes) this.marks(scene, box);
    this.axes(scene);
    return this.drawn;
  }

  box(scene, box) {
    this.clip(box.left - GUTTER, AXIS, box.width + GUTTER + EDGE, () => this.names(scene, box));
    this.clip(box.left, AXIS, box.width, () => {
      this.grid(scene, box);
      const lanes = lanesBetween(box, scene.scroll, scene.scroll + this.height - AXIS);
      const texts = [];
      for (const lane of lanes) this.lane(scene, box, lane, texts);
      this.strips.draw(this.context, this.pending.splice(0), scene.theme.idleChannels);
      this.write(texts);
    });
  }

  clip(x, y, width, draw) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(x, y, width, this.height - y);
    this.context.clip();
    draw();
    this.context.restore();
  }

  // The panel's name and figures, and the names of its devices.
  names(scene, box) {
    const { context } = this, { theme } = scene;
    const y = box.top + AXIS - scene.scroll;
    if (y + HEADING > 0) {
      const left = box.left;
      this.text(box.panel.name, left, y + 17, theme.text, "left", "600 14px");
      const used = box.panel.name ? context.measureText(box.panel.name).width + 14 : 0;
      const figures = box.panel.figures.map(([name, text]) => `${name} ${text}`).join("  ·  ");
      this.text(figures, left + used, y + 17, theme.faint, "left", "12px");
    }
    for (const label of box.labels) {
      const middle = label.y + AXIS - scene.scroll;
      if (middle < AXIS - 20 || middle > this.height + 20) continue;
      this.text(`device ${label.device}`, box.left - 9, middle + 4, theme.faint, "right", "12px");
    }
  }

  grid(scene, box) {
    this.context.fillStyle = scene.theme.grid;
    const top = Math.max(AXIS, box.top + HEADING - 4 + AXIS - scene.scroll);
    const height = box.bottom - 4 + AXIS - scene.scroll - top;
    for (const time of ticksOf(scene.view, box.width)) this.rectangle(scene.x(box, time), top, 1, height);
  }

  lane(scene, box, lane, texts) {
    const y = lane.top + AXIS - scene.scroll;
    if (!lane.row) return this.memory(scene, box, lane, y);
    const { panel } = box, { view, theme } = scene;
    const from = Math.max(0, view.start), to = Math.min(panel.length, view.end);
    const [first, last] = panel.visible(lane.row, view.start, view.end);
    const timed = panel.timed[last] - panel.timed[first];
    if (timed > box.width / WIDE) return this.strip(scene, box, lane, y);
    if (to > from && lane.row.shows === COMPUTE) {
      this.context.fillStyle = theme.idle;
      const x = scene.x(box, from);
      this.rectangle(x, y, scene.x(box, to) - x, lane.height);
    }
    this.events(scene, box, { lane, y, first, last, texts });
    return undefined;
  }

  strip(scene, box, lane, y) {
    const width = Math.round(box.width * this.scale);
    const place = { x: box.left, y, w: box.width, h: lane.height, width };
    const idle = lane.row.shows === COMPUTE;
    const shades = scene.shades[box.panel.number];
    this.pending.push({ ...place, idle, shades, row: lane.row, start: scene.view.start, step: scene.view.span / width });
    this.drawn.strips++;
  }

  events(scene, box, { lane, y, first, last, texts }) {
    const { panel } = box;
    let edge = -1; // the last pixel with a mark of a pass of no length
    for (let i = first; i < last; i++) {
      if (scene.hides(panel, i)) continue;
      const x = scene.x(box, panel.start(i));
      if (panel.durations[i] > 0) {
        this.pass(scene, panel, i, { x, y, width: scene.x(box, panel.end(i)) - x, height: lane.height }, texts);
      } else if (x > edge + 1) {
        this.context.fillStyle = scene.colours(panel, i)[0];
        this.rectangle(x - 1, y, 2, lane.height * 0.45);
        edge = x;
      }
    }
  }

  // One pass: a rectangle, or one per part of passes that run as one, and its text where there is room.
  pass(scene, panel, i, { x, y, width, height }, texts) {
    const gap = width > 3 ? 0.5 : 0;
    const colours = scene.colours(panel, i);
    const part = height / colours.length;
    colours.forEach((colour, k) => {
      this.context.fillStyle = colour;
      this.rectangle(x + gap, y + k * part, Math.max(width - 2 * gap, 0.4), part);
    });
    if (width < 11 || height < 11) return;
    const left = Math.max(x, scene.left), right = Math.min(x + width, scene.right);
    const label = panel.label(i);
    const short = panel.microbatch[i] < 0 ? label : String(panel.microbatch[i]);
    const text = [label, short].find((words) => words.length * 7 + 4 <= right - left);
    if (text) texts.push([text, (left + right) / 2, y + height / 2 + 4, scene.ink(panel, i)]);
  }

  write(texts) {
    const { context } = this;
    context.font = `11px ${FONT}`;
    context.textAlign = "center";
    for (const [text, x, y, ink] of texts) {
      context.fillStyle = ink;
      context.fillText(text, x, y);
    }
    this.drawn.texts += texts.length;
  }

  // Memory as an area; within a pixel the highest value counts.
  memory(scene, box, lane, y) {
    const { panel } = box, { curves } = panel, { view } = scene;
    if (!scene.peak[panel.bytes]) return;
    const begin = curves.firsts[lane.device], end = curves.firsts[lane.device + 1];
    const first = begin + Math.max(0, lastAtMost(end - begin, (k) => curves.times[begin + k] * panel.step, view.start));
    const base = y + lane.height, unit = (lane.height * curves.unit) / scene.peak[panel.bytes];
    const { context } = this;
    context.beginPath();
    let pixel = -Infinity, highest = 0, held = 0;
    const from = Math.max(scene.x(box, 0), box.left);
    context.moveTo(from, base);
    for (let k = first; k < end && curves.times[k] * panel.step <= view.end; k++) {
      const x = Math.max(from, scene.x(box, curves.times[k] * panel.step));
      if (x - pixel >= 1) {
        context.lineTo(Math.max(pixel, from), base - highest * unit);
        context.lineTo(x, base - held * unit);
        [pixel, highest] = [x, 0];
        context.lineTo(x, base - curves.values[k] * unit);
      }
      held = curves.values[k];
      highest = Math.max(highest, held);
    }
    const to = scene.x(box, Math.min(panel.length, view.end));
    if (pixel > -Infinity) context.lineTo(pixel, base - held * unit);
    context.lineTo(to, base - held * unit);
    context.lineTo(to, base);
    context.fillStyle = scene.theme.memory;
    context.globalAlpha = 0.55;
    context.fill();
    context.globalAlpha = 1;
    this.drawn.rectangles++;
  }

  // What is pointed at, what is kept, its chain, and what was found.
  marks(scene, box) {
    this.clip(box.left, AXIS, box.width, () => {
      const { theme } = scene;
      if (scene.chain && scene.chain.panel === box.panel) this.chain(scene, box, scene.chain.events);
      for (const [panel, i] of scene.found) if (panel === box.panel) this.outline(scene, box, i, theme.accent, 2);
      for (const [mark, strength] of [[scene.kept, 2.5], [scene.pointed, 2]]) {
        if (!mark || mark.panel !== box.panel) continue;
        this.awaited(scene, box, mark.i);
        this.outline(scene, box, mark.i, theme.selected, strength);
      }
    });
  }

  awaited(scene, box, i) {
    const cause = box.panel.cause(i);
    if (cause < 0) return;
    const from = scene.place(box, cause), to = scene.place(box, i);
    if (!from || !to) return;
    this.outline(scene, box, cause, scene.theme.accent, 2);
    this.arrow(from.x + from.width, from.y + from.height / 2, to.x, to.y + to.height / 2, scene.theme.accent);
  }

  outline(scene, box, i, colour, strength) {
    const place = scene.place(box, i);
    if (!place || place.x > box.left + box.width || place.x + place.width < box.left) return;
    this.context.strokeStyle = colour;
    this.context.lineWidth = strength;
    this.context.strokeRect(place.x, place.y, Math.max(place.width, 1), place.height);
    this.drawn.rectangles++;
  }

  arrow(x0, y0, x1, y1, colour) {
    const { context } = this;
    const bend = Math.min(60, Math.max(14, Math.abs(x1 - x0) / 2, Math.abs(y1 - y0) / 4));
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 4, y1);
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = 1.8;
    context.stroke();
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x1 - 7, y1 - 4);
    context.lineTo(x1 - 7, y1 + 4);
    context.fill();
  }

  // The chain as one line through the passes, and outlines where they are wide enough.
  chain(scene, box, events) {
    const { context } = this, { panel } = box;
    context.strokeStyle = scene.theme.accent;
    context.lineWidth = 1.6;
    context.beginPath();
    let started = false, outlines = [];
    for (const i of events) {
      if (panel.end(i) < scene.view.start || panel.start(i) > scene.view.end) continue;
      const place = scene.place(box, i);
      if (!place) continue;
      const middle = place.y + place.height / 2;
      if (started) context.lineTo(place.x + place.width, middle);
      else context.moveTo(place.x + place.width, middle);
      context.lineTo(place.x, middle);
      started = true;
      if (place.width >= 5) outlines.push(place);
    }
    context.globalAlpha = 0.8;
    context.stroke();
    for (const place of outlines) context.strokeRect(place.x + 0.5, place.y + 0.5, place.width - 1, place.height - 1);
    context.globalAlpha = 1;
    this.drawn.rectangles += outlines.length;
  }

  // Time, at the top of every column of panels, above everything that scrolls.
  axes(scene) {
    const { context } = this, { theme, view } = scene;
    context.fillStyle = theme.ground;
    context.fillRect(0, 0, this.width, AXIS);
    const lefts = new Set();
    for (const box of scene.boxes) {
      if (lefts.has(box.left)) continue;
      lefts.add(box.left);
      context.fillStyle = theme.line;
      context.fillRect(box.left, AXIS - 1, box.width, 1);
      for (const time of ticksOf(view, box.width)) {
        const x = scene.x(box, time);
        context.fillStyle = theme.faint;
        context.fillRect(x, AXIS - 5, 1, 5);
        this.text(scene.format.time(time, view.span), x, AXIS - 10, theme.faint, "center", "11px");
      }
      if (scene.pointer !== null) this.pointer(scene, box);
    }
  }

  pointer(scene, box) {
    const x = scene.x(box, scene.pointer);
    if (x < box.left || x > box.left + box.width) return;
    this.context.fillStyle = scene.theme.faint;
    this.context.globalAlpha = 0.5;
    this.context.fillRect(x, AXIS, 1, this.height);
    this.context.globalAlpha = 1;
  }

  rectangle(x, y, width, height) {
    this.context.fillRect(x, y, width, height);
    this.drawn.rectangles++;
  }

  text(text, x, y, colour, align, font) {
    this.context.font = `${font} ${FONT}`;
    this.context.textAlign = align;
    this.context.fillStyle = colour;
    this.context.fillText(text, x, y);
  }
}

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

// Round times in view, about one per hundred pixels.
function ticksOf(view, width) {
  const step = roundStep(view.span / Math.max(1, width / 100));
  const times = [];
  for (let k = Math.max(0, Math.ceil(view.start / step)); k * step <= Math.min(view.end, view.length); k++) times.push(k * step);
  return times;
}
