// The visible items, the selection, and the position of each pass.

class Scene {
  constructor(shared, panels) {
    Object.assign(this, { shared, panels });
    this.view = new View(Math.max(...panels.map((panel) => panel.length)), Math.min(...panels.map((panel) => panel.shortest)));
    this.format = new Format(shared.unit, this.view.length);
    this.hidden = new Set(); // kinds
    this.microbatch = null; // highlighted
    this.pointed = this.kept = this.chain = this.pointer = null;
    this.found = [];
    this.history = [];
    this.scroll = 0;
    this.options = { memory: true, transfers: true, sides: false, moves: false };
    this.moves = movesOf(panels);
    // Panels with the same unit share its scale.
    this.peak = { true: highest(panels, true), false: highest(panels, false) };
    this.retheme();
  }

  retheme() {
    this.theme = new Theme(this.shared.looks);
    this.reshade();
  }

  // Mean colours depend on hidden and highlighted items.
  reshade() {
    const cache = new Map();
    const read = (colours) => {
      const key = colours.join();
      if (!cache.has(key)) cache.set(key, meanOf(colours));
      return cache.get(key);
    };
    this.shades = this.panels.map(
      (panel) => new Shades(panel, (i) => (this.hides(panel, i) ? null : read(this.colours(panel, i)))),
    );
  }

  hides(panel, i) { return this.hidden.size > 0 && this.hidden.has(panel.kind(i)); }

  // Whether a pass steps back behind those of another microbatch, or behind those that have another place.
  isBack(panel, i) {
    if (this.microbatch !== null && !panel.belongsTo(i, this.microbatch)) return true;
    return this.options.moves && !this.move(panel, i);
  }

  // How many places later than in the other schedule a pass stands in the order of its device; 0 if it is not known.
  move(panel, i) { return this.moves ? this.moves[panel.number][i] ?? 0 : 0; }

  colours(panel, i) {
    const back = this.isBack(panel, i);
    return this.theme.looks[panel.look[i]].map((look) => (back ? look.back : look.colour));
  }

  ink(panel, i, part) {
    return this.isBack(panel, i) ? this.theme.faint : this.theme.looks[panel.look[i]][part].ink;
  }

  x(box, time) { return box.left + ((time - this.view.start) / this.view.span) * box.width; }
  timeAt(box, x) { return this.view.start + ((x - box.left) / box.width) * this.view.span; }

  boxAt(x, y) {
    const inside = (box) => x >= box.left - GUTTER && x <= box.left + box.width + EDGE;
    const content = y + this.scroll - AXIS;
    return this.boxes.find((box) => inside(box) && content >= box.top && content <= box.bottom) ?? null;
  }

  // The position of an event, or null if its row is hidden.
  place(box, i) {
    const lane = box.laneOf.get(box.panel.rowOf(i));
    if (!lane) return null;
    const x = this.x(box, box.panel.start(i));
    return { x, y: lane.top + AXIS - this.scroll, width: this.x(box, box.panel.end(i)) - x, height: lane.height };
  }

  // The visible cause of an event: a hidden transfer leads on to its own cause.
  shownCause(panel, i) {
    const box = this.boxes.find((entry) => entry.panel === panel);
    const hidden = (k) => k >= 0 && !box.laneOf.has(panel.rowOf(k));
    let cause = panel.cause(i);
    for (let steps = 0; steps < 16 && hidden(cause); steps++) cause = panel.cause(cause);
    return cause;
  }

  // The item at a position of the picture: a panel, an event of it (or -1), a lane and a time; null beside all panels.
  at(x, y) {
    const box = this.boxAt(x, y);
    if (!box || y < AXIS) return null;
    const lane = laneAt(box, y + this.scroll - AXIS) ?? null;
    const time = this.timeAt(box, x);
    const i = lane?.row ? this.eventAt(box, lane.row, time) : -1;
    return { panel: box.panel, lane, time, i: i >= 0 && this.hides(box.panel, i) ? -1 : i };
  }

  // The event under the pointer. If passes are wide, one of length 0 is found three pixels around its mark.
  eventAt(box, row, time) {
    const { panel } = box, pixel = this.view.span / box.width;
    const on = this.passAt(panel, row, time);
    const near = !this.marks(box, row) ? -1 : on < 0 || panel.duration(on) > 10 * pixel ? this.markAt(panel, row, time, 3 * pixel) : -1;
    if (near >= 0) return near;
    if (on >= 0) return on;
    return this.passAt(panel, row, time + pixel); // passes narrower than a pixel
  }

  // The event that takes time and runs at `time`, or -1.
  passAt(panel, row, time) {
    let i = panel.before(row, time);
    while (i >= row.first && !panel.durations[i]) i--;
    return i >= row.first && time <= panel.end(i) && !this.hides(panel, i) ? i : -1;
  }

  // Whether passes of length 0 are marked: not in a row so crowded that marks would hide other passes.
  marks(box, row) {
    const [first, last] = box.panel.visible(row, this.view.start, this.view.end);
    return row.shows !== COMPUTE || (last - first) * 12 <= box.width;
  }

  // The event of length 0 nearest to `time`, or -1.
  markAt(panel, row, time, reach) {
    let best = -1;
    const distance = (i) => Math.abs(panel.start(i) - time);
    for (let i = panel.before(row, time + reach); i >= row.first && panel.start(i) >= time - reach; i--) {
      if (!panel.durations[i] && !this.hides(panel, i) && (best < 0 || distance(i) < distance(best))) best = i;
    }
    return best;
  }
}

function highest(panels, bytes) {
  return Math.max(0, ...panels.filter((panel) => panel.bytes === bytes).map((panel) => panel.highest));
}

function meanOf(colours) {
  const all = colours.map((colour) => (colour[0] === "#" ? channels(colour) : colour.match(/\d+/g).map(Number)));
  return [0, 1, 2].map((k) => all.reduce((sum, rgb) => sum + rgb[k], 0) / all.length);
}
