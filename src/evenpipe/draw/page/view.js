// The visible time interval: one for all panels, so that they zoom and move together.

class View {
  constructor(length, shortest) {
    this.length = length > 0 ? length : 1;
    this.least = Math.min(this.length, Math.max(shortest * 2, this.length * 1e-7));
    this.fit();
  }

  get span() { return this.end - this.start; }

  // A margin at both ends, so that the first and the last edge are visible.
  fit() { this.show(-0.004 * this.length, 1.008 * this.length); }

  show(start, span) {
    const whole = 1.008 * this.length;
    span = Math.min(whole, Math.max(this.least, span));
    start = Math.min(Math.max(start, -0.004 * this.length), 1.004 * this.length - span);
    this.start = start;
    this.end = start + span;
  }

  // A factor below 1 zooms in; the position of `time` stays fixed.
  zoom(factor, time = (this.start + this.end) / 2) {
    const span = Math.min(1.008 * this.length, Math.max(this.least, this.span * factor));
    this.show(time - ((time - this.start) * span) / this.span, span);
  }

  pan(time) { this.show(this.start + time, this.span); }

  // Bring a time interval into view; zoom only if it does not fit, or would be too small to see.
  reveal(start, end, smallest = 0) {
    const duration = Math.max(end - start, this.least / 4);
    if (duration < this.span * smallest) this.show((start + end - duration / smallest) / 2, duration / smallest);
    else if (duration > this.span) this.show(start - duration * 0.1, duration * 1.2);
    if (start < this.start || end > this.end) this.show((start + end - this.span) / 2, this.span);
  }
}
