// Draws only the visible part of a scene. The cost of a redraw depends on the number of pixels: if passes
// are narrower than a few pixels, their row is one strip of mean colours (shades.js), however many they are.

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

  // Returns the numbers of drawn rectangles, texts and strips.
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
      this.text(this.figures(box.panel, box.width - used), left + used, y + 17, theme.faint, "left", "12px");
    }
    for (const label of box.labels) {
      const middle = label.y + AXIS - scene.scroll;
      if (middle < AXIS - 20 || middle > this.height + 20) continue;
      this.text(`device ${label.device}`, box.left - 9, middle + 4, theme.faint, "right", "12px");
    }
    for (const lane of lanesBetween(box, scene.scroll, scene.scroll + this.height - AXIS)) {
      if (lane.row) continue;
      const { peaks } = box.panel.curves, bottom = lane.top + lane.height + AXIS - scene.scroll;
      this.text(peakText(box.panel, peaks[lane.device]), box.left - 9, bottom, theme.faint, "right", "10px");
    }
  }

  // As many figures as fit.
  figures(panel, room) {
    this.context.font = `12px ${FONT}`;
    const words = panel.figures.map(([name, text]) => `${name} ${text}`);
    while (words.length && this.context.measureText(words.join("  ·  ")).width > room) words.pop();
    return words.join("  ·  ");
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
    const marks = scene.marks(box, lane.row);
    let edge = -1; // the last pixel with a mark of a pass of length 0
    for (let i = first; i < last; i++) {
      if (lane.row.shows === COMPUTE) this.wait(scene, box, i, y, lane.height);
      if (scene.hides(panel, i)) continue;
      const x = scene.x(box, panel.start(i));
      if (panel.durations[i] > 0) {
        this.pass(scene, box, i, { x, y, width: scene.x(box, panel.end(i)) - x, height: lane.height }, texts);
      } else if (marks && x > edge + 1) {
        this.context.fillStyle = scene.colours(panel, i)[0];
        this.rectangle(x - 1, y, 2, lane.height * 0.45);
        edge = x;
      }
    }
  }

  // A slim bar in the idle time before a pass, in the colour of the transfer that it waited for.
  wait(scene, box, i, y, height) {
    const { panel } = box;
    const cause = panel.awaited(i);
    if (cause < 0) return;
    const x = scene.x(box, panel.start(i) - panel.idleBefore(i));
    this.context.fillStyle = scene.colours(panel, cause)[0];
    this.rectangle(x, y + height * 0.35, scene.x(box, panel.start(i)) - x, height * 0.3);
  }

  // One pass: a rectangle, or one per part of passes that run as one, and its text if there is room.
  pass(scene, box, i, { x, y, width, height }, texts) {
    const { panel } = box;
    const gap = width > 3 ? 0.5 : 0;
    const colours = scene.colours(panel, i);
    const part = height / colours.length;
    colours.forEach((colour, k) => {
      this.context.fillStyle = colour;
      this.rectangle(x + gap, y + k * part, Math.max(width - 2 * gap, 0.4), part);
    });
    if (width < 11 || height < 11) return;
    const left = Math.max(x, box.left), right = Math.min(x + width, box.left + box.width);
    panel.parts(i).forEach(([label, short], k) => {
      const more = panel.digits - short.length; // in a row, all passes of one width have numbers, or none has
      const fits = (words) => words && (words.length + more) * 7 + 4 <= right - left;
      const mark = scene.options.moves && k === 0 ? moveMark(scene.move(panel, i)) : "";
      const text = (mark ? [`${label} ${mark}`, mark] : [label, short]).find(fits);
      const middle = y + (k + 0.5) * part + 4;
      if (text && part >= 11) texts.push([text, (left + right) / 2, middle, scene.ink(panel, i, k)]);
    });
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

  // Memory as an area; a step is drawn where the highest value of a pixel differs from that of the one before.
  memory(scene, box, lane, y) {
    const { panel } = box, { view, theme } = scene;
    const peak = scene.peak[panel.bytes];
    const from = Math.max(scene.x(box, 0), box.left);
    const columns = Math.floor(Math.min(scene.x(box, panel.length), box.left + box.width) - from);
    if (!peak || columns < 1) return;
    const heights = panel.highestPerColumn(lane.device, scene.timeAt(box, from), view.span / box.width, columns);
    const { context } = this, base = y + lane.height, unit = lane.height / peak;
    context.beginPath();
    context.moveTo(from, base);
    for (let column = 0, last = 0; column < columns; column++) {
      if (heights[column] === last) continue;
      context.lineTo(from + column, base - last * unit);
      last = heights[column];
      context.lineTo(from + column, base - last * unit);
    }
    context.lineTo(from + columns, base - heights[columns - 1] * unit);
    context.lineTo(from + columns, base);
    context.fillStyle = theme.memory;
    context.globalAlpha = 0.55;
    context.fill();
    context.globalAlpha = 1;
    this.drawn.rectangles++;
    if (!panel.limit) return;
    context.fillStyle = theme.text;
    this.rectangle(from, Math.round(base - panel.limit[lane.device] * unit), columns, 1);
  }

  // The item under the pointer, the selection, its chain, and search results.
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
    const cause = scene.shownCause(box.panel, i);
    if (cause < 0) return;
    const from = scene.place(box, cause), to = scene.place(box, i);
    if (!from || !to) return;
    this.outline(scene, box, cause, scene.theme.accent, 2);
    if (from.y === to.y && to.x - from.x - from.width < 12) return; // neighbours need no arrow
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

  // The chain: outlines of its passes, a line through those too narrow for one, and lines from row to row.
  chain(scene, box, events) {
    const { context } = this, { panel } = box, { view } = scene;
    const outlines = [], pen = new Pen(context);
    context.beginPath();
    for (const i of events) {
      const place = panel.start(i) > view.end ? null : scene.place(box, i);
      if (!place) continue;
      const middle = place.y + place.height / 2;
      pen.line(place.x + place.width, middle);
      if (place.width >= 5) {
        outlines.push(place);
        pen.jump(place.x, middle);
      } else {
        pen.line(place.x, middle);
      }
      if (panel.end(i) < view.start) break;
    }
    context.strokeStyle = scene.theme.accent;
    context.lineWidth = 1.6;
    context.stroke();
    for (const place of outlines) context.strokeRect(place.x + 0.5, place.y + 0.5, place.width - 1, place.height - 1);
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

// A line of straight parts, without those of less than a pixel along a row.
class Pen {
  constructor(context) {
    this.context = context;
    this.x = this.y = null;
  }

  line(x, y) {
    if (y === this.y && Math.abs(x - this.x) < 1) return;
    if (this.x === null) this.context.moveTo(x, y);
    else this.context.lineTo(x, y);
    [this.x, this.y] = [x, y];
  }

  jump(x, y) {
    this.context.moveTo(x, y);
    [this.x, this.y] = [x, y];
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
