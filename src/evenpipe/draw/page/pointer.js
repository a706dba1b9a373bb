// Mouse, pen and fingers on the picture: point, click, drag, wheel, pinch.

class Pointer {
  constructor(page) {
    Object.assign(this, { page, scene: page.scene, canvas: page.canvas, stage: page.stage });
    this.down = new Map(); // positions of pressed buttons and fingers
    const on = (name, action, options) => this.canvas.addEventListener(name, action, options);
    on("wheel", (event) => this.wheel(event), { passive: false });
    on("pointerdown", (event) => this.press(event));
    on("pointermove", (event) => (this.down.size ? this.drag(event) : this.point(event)));
    on("pointerup", (event) => this.lift(event));
    on("pointercancel", (event) => this.lift(event));
    on("pointerleave", () => this.leave());
  }

  placeOf(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  }

  // The box at a position, also above and below its lanes.
  boxAt(x) {
    const { boxes } = this.scene;
    return boxes.find((box) => x <= box.left + box.width + EDGE) ?? boxes[boxes.length - 1];
  }

  wheel(event) {
    event.preventDefault();
    const [x] = this.placeOf(event);
    const box = this.boxAt(x), { view } = this.scene;
    const lines = event.deltaMode === 1 ? 20 : 1;
    const across = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      view.pan((across * lines * view.span) / box.width);
    } else {
      const strength = event.ctrlKey ? 0.01 : 0.0018; // ctrl: a pinch on a touch pad
      view.zoom(Math.exp(Math.max(-0.7, Math.min(0.7, event.deltaY * lines * strength))), this.scene.timeAt(box, x));
    }
    this.point(event);
  }

  press(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.down.set(event.pointerId, this.placeOf(event));
    this.moved = this.down.size > 1;
  }

  drag(event) {
    const before = this.down.get(event.pointerId);
    if (!before) return;
    const now = this.placeOf(event);
    const [dx, dy] = [now[0] - before[0], now[1] - before[1]];
    if (this.down.size === 2) this.pinch(event.pointerId, before, now);
    else if (this.moved || Math.hypot(dx, dy) >= 4) this.move(event.pointerId, now, dx, dy);
  }

  move(id, now, dx, dy) {
    const { view } = this.scene;
    this.moved = true;
    this.canvas.classList.add("dragging");
    this.leave();
    this.down.set(id, now);
    view.pan((-dx * view.span) / this.boxAt(now[0]).width);
    scrollBy(0, -dy);
    this.page.changed();
  }

  pinch(id, before, now) {
    const [, other] = [...this.down].find(([key]) => key !== id);
    const [was, is] = [Math.abs(before[0] - other[0]), Math.abs(now[0] - other[0])];
    const middle = (now[0] + other[0]) / 2;
    if (was > 8 && is > 8) this.page.zoom(was / is, this.scene.timeAt(this.boxAt(middle), middle));
    this.down.set(id, now);
  }

  lift(event) {
    const started = this.down.delete(event.pointerId);
    this.canvas.classList.remove("dragging");
    if (started && !this.moved && event.type === "pointerup") this.click(event);
  }

  // The first click selects a pass, further clicks follow its causes back.
  click(event) {
    this.stage.focus({ preventScroll: true });
    const { scene, page } = this;
    const hit = scene.at(...this.placeOf(event));
    if (!hit || hit.i < 0) return page.release();
    const again = scene.kept && scene.kept.panel === hit.panel && scene.kept.i === hit.i;
    if (again && scene.shownCause(hit.panel, hit.i) >= 0) return page.follow();
    scene.found = [];
    return page.keep(hit.panel, hit.i);
  }

  point(event) {
    const { scene } = this;
    const hit = scene.at(...this.placeOf(event));
    scene.pointed = hit && hit.i >= 0 ? { panel: hit.panel, i: hit.i } : null;
    scene.pointer = hit ? hit.time : null;
    this.tip(hit, event);
    this.page.changed();
  }

  leave() {
    this.scene.pointed = this.scene.pointer = null;
    get("tip").hidden = true;
    this.page.changed();
  }

  tip(hit, event) {
    const tip = get("tip"), { format } = this.scene;
    if (hit && hit.i >= 0) {
      const { panel, i } = hit;
      fillTip(tip, panel.label(i), panel.words(i), factsOf(this.scene, panel, i));
    } else if (hit?.lane && !hit.lane.row) {
      fillMemoryTip(tip, hit, format);
    } else {
      tip.hidden = true;
      return;
    }
    placeTip(tip, event.clientX, event.clientY);
  }
}
