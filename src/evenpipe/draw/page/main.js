// Connects buttons, search and clicks to the scene, and schedules redraws.

class Page {
  constructor(scene) {
    this.scene = scene;
    this.stage = get("stage");
    this.canvas = get("picture");
    this.painter = new Painter(this.canvas);
    this.overview = new Overview(get("overview"), scene.view, () => this.changed());
    this.buttons();
    this.pointer = new Pointer(this);
    this.keys = new Keys(this);
    get("search").addEventListener("submit", (event) => this.search(event));
    addEventListener("scroll", () => this.changed(), { passive: true });
    window.addEventListener("resize", () => this.arrange());
    new ResizeObserver(() => this.stage.clientWidth === this.painter.width || this.arrange()).observe(this.stage);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.scene.retheme();
      this.recolour();
    });
    this.recolour();
    this.say();
  }

  // Positions follow the window and the switches.
  arrange() {
    const { scene, stage } = this;
    const room = Math.max(260, innerHeight - (stage.getBoundingClientRect().top + scrollY) - 60);
    const { boxes, height } = layoutOf(scene.panels, { ...scene.options, width: stage.clientWidth, height: room - 80 });
    scene.boxes = boxes;
    const whole = height + AXIS, shown = Math.min(whole, innerHeight);
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

  // How far the page has scrolled into the picture: the canvas is as high as the window and stays in it, so that one bar
  // scrolls both.
  get scrolled() {
    const { top, height } = get("extent").getBoundingClientRect();
    return Math.max(0, Math.min(-top, height - this.painter.height));
  }

  set scrolled(pixels) {
    scrollBy(0, get("extent").getBoundingClientRect().top + Math.max(0, pixels));
  }

  // At most one redraw per frame.
  changed() {
    this.waiting ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    const { scene } = this;
    cancelAnimationFrame(this.waiting);
    this.waiting = undefined;
    const begin = performance.now();
    scene.scroll = this.scrolled;
    this.drawn = this.painter.draw(scene);
    this.overview.draw(scene);
    this.drawn.milliseconds = performance.now() - begin;
  }

  say() {
    const actions = { follow: () => this.follow(), back: () => this.back(), release: () => this.release() };
    fillChosen(get("chosen"), this.scene, actions);
  }

  // ---- selection

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
    const cause = kept ? this.scene.shownCause(kept.panel, kept.i) : -1;
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
    if (top < this.scrolled || top > this.scrolled + this.painter.height - AXIS - 30) {
      this.scrolled = top - this.painter.height / 2;
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
    if (!result) return this.report(text.trim() ? "expected a pass such as 2F3" : "");
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
    this.scrolled = box.labels[device].y - this.painter.height / 2;
    return this.report(`device ${device}`);
  }

  report(text) {
    get("found").textContent = text;
  }

  // ---- buttons

  buttons() {
    const { options, panels } = this.scene;
    const press = (id, action) => get(id).addEventListener("click", action);
    press("in", () => this.zoom(0.6));
    press("out", () => this.zoom(1 / 0.6));
    press("fit", () => this.fit());
    press("critical", () => this.critical());
    for (const name of ["memory", "transfers", "moves", "sides"]) press(name, () => this.toggle(name));
    press("help", () => this.help());
    get("sides").hidden = panels.length < 2;
    get("moves").hidden = !this.scene.moves;
    options.transfers = panels.some((panel) => panel.rows.some((row) => row.shows !== COMPUTE));
    get("transfers").hidden = !options.transfers;
    const rows = panels.reduce((sum, panel) => sum + panel.rows.length, 0);
    const timed = panels.some((panel) => panel.rows.some((row) => row.shows !== COMPUTE && panel.timedIn(row)));
    if (options.transfers && (rows > 60 || !timed)) this.toggle("transfers", false);
  }

  toggle(name, arrange = true) {
    const { options } = this.scene;
    options[name] = !options[name];
    get(name).setAttribute("aria-pressed", String(options[name]));
    if (name === "moves") this.scene.reshade();
    if (arrange) this.recolour();
  }

  help() {
    const keys = get("keys");
    keys.hidden = !keys.hidden;
    get("help").setAttribute("aria-expanded", String(!keys.hidden));
    this.arrange();
  }

  fit() {
    this.scene.view.fit();
    this.changed();
  }

  zoom(factor, time) {
    this.scene.view.zoom(factor, time);
    this.changed();
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
  get("trouble").textContent = `The picture cannot be drawn: ${error.message ?? error}. It needs a browser of 2023 or later.`;
  throw error;
});
