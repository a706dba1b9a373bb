// A small overview above the picture: all devices of all panels, and a window over the visible part.

class Overview {
  constructor(canvas, view, changed) {
    this.canvas = canvas;
    this.view = view;
    this.changed = changed;
    this.strips = new Strips();
    this.whole = document.createElement("canvas");
    canvas.addEventListener("pointerdown", (event) => this.grab(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", () => { this.grabbed = null; });
    canvas.addEventListener("pointercancel", () => { this.grabbed = null; });
  }

  // Draw all panels; the window is drawn over it at every change of the view.
  render(scene) {
    const scale = window.devicePixelRatio || 1;
    const { panels } = scene;
    this.width = this.canvas.parentElement.clientWidth - 32;
    this.height = Math.min(96, 40 + 26 * (panels.length - 1));
    for (const canvas of [this.canvas, this.whole]) {
      canvas.width = Math.round(this.width * scale);
      canvas.height = Math.round(this.height * scale);
    }
    this.canvas.style.height = `${this.height}px`;
    this.scale = scale;
    const context = this.whole.getContext("2d");
    const height = (this.whole.height - 4 * scale * (panels.length - 1)) / panels.length;
    panels.forEach((panel, k) => {
      this.panel(context, scene, panel, k * (height + 4 * scale), height);
    });
    this.draw(scene);
  }

  panel(context, scene, panel, top, height) {
    const rows = panel.rows.filter((row) => row.shows === COMPUTE);
    const width = this.whole.width, each = height / Math.max(1, rows.length);
    const entries = rows.map((row, k) => ({
      shades: scene.shades[panel.number], row, start: 0, step: this.view.length / width, width,
      x: 0, y: top + k * each, w: width, h: each > 4 ? each - 1 : each,
    }));
    this.strips.draw(context, entries, scene.theme.idleChannels);
  }

  draw(scene) {
    const context = this.canvas.getContext("2d");
    const { width, height } = this.canvas;
    const [left, right] = [this.view.start, this.view.end].map((time) => (time / this.view.length) * width);
    context.clearRect(0, 0, width, height);
    context.drawImage(this.whole, 0, 0);
    context.fillStyle = scene.theme.ground;
    context.globalAlpha = 0.62;
    context.fillRect(0, 0, left, height);
    context.fillRect(right, 0, width - right, height);
    context.globalAlpha = 1;
    context.strokeStyle = scene.theme.selected;
    context.lineWidth = 1.5 * this.scale;
    const x = Math.max(left, 1), end = Math.min(right, width - 1);
    context.strokeRect(x, 1, Math.max(2, end - x), height - 2);
  }

  timeAt(event) {
    const { left, width } = this.canvas.getBoundingClientRect();
    return ((event.clientX - left) / width) * this.view.length;
  }

  grab(event) {
    const time = this.timeAt(event);
    if (time < this.view.start || time > this.view.end) this.view.show(time - this.view.span / 2, this.view.span);
    this.grabbed = time - this.view.start;
    this.canvas.setPointerCapture(event.pointerId);
    this.changed();
  }

  move(event) {
    if (this.grabbed === null || this.grabbed === undefined) return;
    this.view.show(this.timeAt(event) - this.grabbed, this.view.span);
    this.changed();
  }
}
