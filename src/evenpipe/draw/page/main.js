// Puts everything together: the scene (what is shown and what is chosen), and what mouse, keys and buttons do to it.

class Scene {
  constructor(shared, panels) {
    Object.assign(this, { shared, panels });
    this.view = new View(Math.max(...panels.map((panel) => panel.length)), Math.min(...panels.map((panel) => panel.shortest)));
    this.format = new Format(shared.unit, this.view.length);
    this.hidden = new Set(); // kinds
    this.microbatch = null; // lit up
    this.pointed = this.kept = this.chain = this.pointer = null;
    this.found = [];
    this.history = [];
    this.scroll = 0;
    this.options = { memory: true, transfers: true, sides: false };
    // Panels that show the same amount share its scale.
    this.peak = { true: highest(panels, true), false: highest(panels, false) };
    this.retheme();
  }

  retheme() {
    this.theme = new Theme(this.shared.looks);
    this.reshade();
  }

  // Mean colours depend on what is hidden and what is lit up.
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
  isBack(panel, i) { return this.microbatch !== null && !panel.belongsTo(i, this.microbatch); }

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

  // Where an event is drawn, or null where its row is not shown.
  place(box, i) {
    const lane = box.laneOf.get(box.panel.rowOf(i));
    if (!lane) return null;
    const x = this.x(box, box.panel.start(i));
    return { x, y: lane.top + AXIS - this.scroll, width: this.x(box, box.panel.end(i)) - x, height: lane.height };
  }

  // What is at a place of the picture: a panel, an event of it (or -1), a lane and a time; null beside all panels.
  at(x, y) {
    const box = this.boxAt(x, y);
    if (!box || y < AXIS) return null;
    const lane = laneAt(box, y + this.scroll - AXIS) ?? null;
    const time = this.timeAt(box, x);
    const i = lane?.row ? this.eventAt(box, lane.row, time) : -1;
    return { panel: box.panel, lane, time, i: i >= 0 && this.hides(box.panel, i) ? -1 : i };
  }

  // The event under the pointer. Where passes are wide, one of no length is found three pixels around its mark.
  eventAt(box, row, time) {
    const { panel } = box, pixel = this.view.span / box.width;
    const on = this.passAt(panel, row, time);
    const near = on < 0 || panel.duration(on) > 10 * pixel ? this.markAt(panel, row, time, 3 * pixel) : -1;
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

  // The event of no length nearest to `time`, or -1.
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
  return Math.max(0, ...panels.filter((panel) => panel.bytes === bytes).map((panel) => panel.peak));
}

function meanOf(colours) {
  const all = colours.map((colour) => (colour[0] === "#" ? channels(colour) : colour.match(/\d+/g).map(Number)));
  return [0, 1, 2].map((k) => all.reduce((sum, rgb) => sum + rgb[k], 0) / all.length);
}

class Page {
  constructor(scene) {
    this.scene = scene;
    this.stage = get("stage");
    this.canvas = get("picture");
    this.painter = new Painter(this.canvas);
    this.overview = new Overview(get("overview"), scene.view, () => this.changed());
    this.pointers = new Map();
    this.frames = [];
    this.buttons();
    this.mouse();
    get("search").addEventListener("submit", (event) => this.search(event));
    document.addEventListener("keydown", (event) => this.key(event));
    this.stage.addEventListener("scroll", () => this.changed());
    new ResizeObserver(() => this.arrange()).observe(document.body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.scene.retheme();
      this.recolour();
    });
    this.recolour();
    this.say();
  }

  // Places follow the window and the switches.
  arrange() {
    const { scene, stage } = this;
    const room = Math.max(260, innerHeight - (stage.getBoundingClientRect().top + scrollY) - 60);
    const { boxes, height } = layoutOf(scene.panels, { ...scene.options, width: stage.clientWidth, height: room - 80 });
    scene.boxes = boxes;
    const whole = height + AXIS, shown = Math.min(whole, room);
    stage.style.height = `${shown + 2}px`;
    get("extent").style.height = `${whole}px`;
    this.painter.resize(stage.clientWidth, shown);
    this.overview.render(scene);
    this.draw(); // at once: a canvas of a new size is empty
  }

  recolour() {
    fillLegend(get("legend"), this.scene, () => this.reshade());
    this.arrange();
  }

  reshade() {
    this.scene.reshade();
    this.recolour();
  }

  // One redraw per frame, however often something changes.
  changed() {
    this.waiting ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    const { scene } = this;
    cancelAnimationFrame(this.waiting);
    this.waiting = undefined;
    const begin = performance.now();
    scene.scroll = this.stage.scrollTop;
    scene.left = Math.min(...scene.boxes.map((box) => box.left));
    scene.right = this.painter.width;
    this.drawn = this.painter.draw(scene);
    this.overview.draw(scene);
    this.drawn.milliseconds = performance.now() - begin;
  }

  say() {
    const actions = { follow: () => this.follow(), back: () => this.back(), release: () => this.release() };
    fillChosen(get("chosen"), this.scene, actions);
  }

  // ---- what is chosen

  keep(panel, i, history = []) {
    const { scene } = this;
    scene.kept = { panel, i };
    scene.history = history;
    scene.chain = { panel, events: chainFrom(panel, i) };
    this.light(panel.microbatch[i] < 0 ? null : panel.microbatch[i]);
    this.say();
    this.changed();
  }

  light(microbatch) {
    if (this.scene.microbatch === microbatch) return;
    this.scene.microbatch = microbatch;
    this.scene.reshade();
    this.overview.render(this.scene);
  }

  release() {
    Object.assign(this.scene, { kept: null, chain: null, history: [], found: [] });
    get("found").textContent = "";
    this.light(null);
    this.say();
    this.changed();
  }

  follow() {
    const { kept, history } = this.scene;
    const cause = kept ? kept.panel.cause(kept.i) : -1;
    if (cause < 0) return;
    this.keep(kept.panel, cause, [...history, kept]);
    this.show(kept.panel, cause);
  }

  back() {
    const { history } = this.scene;
    if (!history.length) return;
    const { panel, i } = history[history.length - 1];
    this.keep(panel, i, history.slice(0, -1));
    this.show(panel, i);
  }

  neighbour(step) {
    const { kept, panels } = this.scene;
    const panel = kept?.panel ?? panels[0];
    const row = kept ? panel.rowOf(kept.i) : panel.rows[0];
    const i = kept ? kept.i + step : row?.first;
    if (!row || i < row.first || i >= row.last) return;
    this.keep(panel, i);
    this.show(panel, i);
  }

  critical() {
    const { scene } = this;
    const at = scene.kept ? scene.panels.indexOf(scene.kept.panel) : -1;
    const same = at >= 0 && scene.kept.i === scene.kept.panel.lastToEnd();
    const panel = scene.panels[same ? (at + 1) % scene.panels.length : Math.max(0, at)];
    if (panel.lastToEnd() < 0) return;
    this.keep(panel, panel.lastToEnd());
    this.light(null);
    this.show(panel, panel.lastToEnd());
  }

  // Bring a pass into view.
  show(panel, i, smallest = 0) {
    const { scene } = this;
    scene.view.reveal(panel.start(i), panel.end(i), smallest);
    const box = scene.boxes.find((entry) => entry.panel === panel);
    const place = scene.place(box, i);
    const top = place ? place.y - AXIS + scene.scroll : box.top;
    if (top < this.stage.scrollTop || top > this.stage.scrollTop + this.painter.height - AXIS - 30) {
      this.stage.scrollTop = top - this.painter.height / 2;
    }
    this.changed();
  }

  // ---- search

  search(event) {
    event.preventDefault();
    const text = get("query").value;
    if (this.last?.text === text && this.last.events?.length) return this.found(this.last, this.last.next + 1);
    const result = searched(text, this.scene.panels);
    this.last = { text, next: 0, ...result };
    if (!result) return this.report(text.trim() ? "write it as in 2F3" : "");
    if (result.events) return this.found(this.last, 0);
    this.scene.found = [];
    if (result.device !== undefined) return this.toDevice(result.device);
    this.light(result.microbatch);
    const any = this.scene.panels.some((panel) => panel.microbatch.includes(result.microbatch));
    this.changed();
    return this.report(any ? `microbatch ${result.microbatch}` : `no microbatch ${result.microbatch}`);
  }

  found(search, number) {
    const { events } = search;
    this.scene.found = events;
    if (!events.length) return this.report(`no ${search.text.trim()}`);
    search.next = number % events.length;
    const [panel, i] = events[search.next];
    this.keep(panel, i);
    this.show(panel, i, 0.02);
    const where = `device ${panel.rowOf(i).device}${panel.name ? `, ${panel.name}` : ""}`;
    return this.report(`${search.next + 1} of ${events.length}: ${where}`);
  }

  toDevice(device) {
    const box = this.scene.boxes.find((entry) => device < entry.panel.devices);
    if (!box) return this.report(`no device ${device}`);
    this.stage.scrollTop = box.labels[device].y - this.painter.height / 2;
    return this.report(`device ${device}`);
  }

  report(text) {
    get("found").textContent = text;
  }

  // ---- buttons and keys

  buttons() {
    const { view, options, panels } = this.scene;
    const press = (id, action) => get(id).addEventListener("click", action);
    press("in", () => this.zoom(0.6));
    press("out", () => this.zoom(1 / 0.6));
    press("fit", () => { view.fit(); this.changed(); });
    press("critical", () => this.critical());
    for (const name of ["memory", "transfers", "sides"]) press(name, () => this.toggle(name));
    press("help", () => this.help());
    get("sides").hidden = panels.length < 2;
    options.transfers = panels.some((panel) => panel.rows.some((row) => row.shows !== COMPUTE));
    get("transfers").hidden = !options.transfers;
    const rows = panels.reduce((sum, panel) => sum + panel.rows.length, 0);
    if (options.transfers && rows > 60) this.toggle("transfers", false);
  }

  toggle(name, arrange = true) {
    const { options } = this.scene;
    options[name] = !options[name];
    get(name).setAttribute("aria-pressed", String(options[name]));
    if (arrange) this.recolour();
  }

  help() {
    const keys = get("keys");
    keys.hidden = !keys.hidden;
    get("help").setAttribute("aria-expanded", String(!keys.hidden));
    this.arrange();
  }

  zoom(factor, time) {
    this.scene.view.zoom(factor, time);
    this.changed();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.tagName === "INPUT") {
      if (event.key === "Escape") this.stage.focus();
      return;
    }
    const action = this.actions()[event.key];
    const arrow = event.key.startsWith("Arrow") && event.target !== this.stage && event.target !== document.body;
    if (!action || arrow) return;
    event.preventDefault();
    action();
  }

  actions() {
    const { view } = this.scene;
    const pan = (part) => { view.pan(view.span * part); this.changed(); };
    const scroll = (pixels) => { this.stage.scrollTop += pixels; };
    return {
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6),
      0: () => { view.fit(); this.changed(); },
      ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), ArrowUp: () => scroll(-60), ArrowDown: () => scroll(60),
      Home: () => { view.show(0, view.span); this.changed(); },
      End: () => { view.show(view.length, view.span); this.changed(); },
      w: () => this.follow(), b: () => this.back(), ",": () => this.neighbour(-1), ".": () => this.neighbour(1),
      c: () => this.critical(), m: () => this.toggle("memory"), "?": () => this.help(), Escape: () => this.release(),
      t: () => get("transfers").hidden || this.toggle("transfers"), s: () => get("sides").hidden || this.toggle("sides"),
      "/": () => get("query").select(),
    };
  }

  // ---- mouse, pen and fingers

  mouse() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => (this.pointers.size ? this.drag(event) : this.point(event)));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => this.up(event));
    canvas.addEventListener("pointerleave", () => this.unpoint());
  }

  positionOf(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  }

  // The box whose time a place is on, also above and below its lanes.
  columnAt(x) {
    const { boxes } = this.scene;
    return boxes.find((box) => x <= box.left + box.width + EDGE) ?? boxes[boxes.length - 1];
  }

  wheel(event) {
    event.preventDefault();
    const [x] = this.positionOf(event);
    const box = this.columnAt(x), { view } = this.scene;
    const lines = event.deltaMode === 1 ? 20 : 1;
    const across = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      view.pan((across * lines * view.span) / box.width);
    } else {
      const strength = event.ctrlKey ? 0.01 : 0.0018;
      view.zoom(Math.exp(Math.max(-0.7, Math.min(0.7, event.deltaY * lines * strength))), this.scene.timeAt(box, x));
    }
    this.changed();
    this.point(event);
  }

  down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.positionOf(event));
    this.moved = this.pointers.size > 1;
  }

  drag(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return;
    const now = this.positionOf(event);
    if (this.pointers.size === 2) return this.pinch(event.pointerId, before, now);
    const [dx, dy] = [now[0] - before[0], now[1] - before[1]];
    if (!this.moved && Math.hypot(dx, dy) < 4) return undefined;
    this.moved = true;
    this.canvas.classList.add("dragging");
    this.unpoint();
    this.pointers.set(event.pointerId, now);
    const { view } = this.scene;
    view.pan((-dx * view.span) / this.columnAt(now[0]).width);
    this.stage.scrollTop -= dy;
    this.changed();
    return undefined;
  }

  pinch(id, before, now) {
    const [, other] = [...this.pointers].find(([key]) => key !== id);
    const [was, is] = [Math.abs(before[0] - other[0]), Math.abs(now[0] - other[0])];
    if (was > 8 && is > 8) this.zoom(was / is, this.scene.timeAt(this.columnAt(now[0]), (now[0] + other[0]) / 2));
    this.pointers.set(id, now);
  }

  up(event) {
    const started = this.pointers.delete(event.pointerId);
    this.canvas.classList.remove("dragging");
    if (started && !this.moved && event.type === "pointerup") this.click(event);
  }

  click(event) {
    this.stage.focus({ preventScroll: true });
    const { scene } = this;
    const hit = scene.at(...this.positionOf(event));
    if (!hit || hit.i < 0) return this.release();
    const again = scene.kept && scene.kept.panel === hit.panel && scene.kept.i === hit.i;
    if (again && hit.panel.cause(hit.i) >= 0) return this.follow();
    scene.found = [];
    return this.keep(hit.panel, hit.i);
  }

  point(event) {
    const { scene } = this;
    const [x, y] = this.positionOf(event);
    const hit = scene.at(x, y);
    scene.pointed = hit && hit.i >= 0 ? { panel: hit.panel, i: hit.i } : null;
    scene.pointer = hit ? hit.time : null;
    this.tip(hit, event);
    this.changed();
  }

  unpoint() {
    this.scene.pointed = this.scene.pointer = null;
    get("tip").hidden = true;
    this.changed();
  }

  tip(hit, event) {
    const tip = get("tip");
    const { format } = this.scene;
    if (hit && hit.i >= 0) {
      const { panel, i } = hit;
      fillTip(tip, panel.label(i), panel.words(i), factsOf(panel, i, format));
    } else if (hit?.lane && !hit.lane.row) {
      const { panel } = hit, { device } = hit.lane;
      const facts = [["time", format.time(hit.time)], ["peak", amountText(panel, panel.curves.peaks[device])]];
      fillTip(tip, amountText(panel, panel.memoryAt(device, hit.time)), `held by device ${device}`, facts);
    } else {
      tip.hidden = true;
      return;
    }
    placeTip(tip, event.clientX, event.clientY);
  }
}

function get(id) {
  return document.getElementById(id);
}

async function begin() {
  const shared = JSON.parse(get("data").textContent);
  const panels = await Promise.all(shared.panels.map((data, number) => Panel.read(data, shared, number)));
  window.evenpipe = new Page(new Scene(shared, panels));
}

begin().catch((error) => {
  get("trouble").hidden = false;
  get("trouble").textContent = `The picture cannot be drawn: ${error.message ?? error}. A browser of 2023 or later can.`;
  throw error;
});
