// Rows from far away: the mean colour of every pixel, whatever the number of passes in it. Sums of colour times duration over
// the events give the mean of any time interval with two look-ups.

class Shades {
  // colour(i): [red, green, blue] of an event, or null if it is hidden.
  constructor(panel, colour) {
    this.panel = panel;
    // Four sums per event: red, green and blue, each times duration, and duration, over the events before it.
    const sums = new Float64Array(4 * (panel.count + 1));
    for (let i = 0; i < panel.count; i++) {
      const rgb = colour(i), ticks = rgb ? panel.durations[i] : 0;
      for (let k = 0; k < 3; k++) sums[4 * i + 4 + k] = sums[4 * i + k] + (rgb ? rgb[k] * ticks : 0);
      sums[4 * i + 7] = sums[4 * i + 3] + ticks;
    }
    this.sums = sums;
  }

  // Write the colours of `width` pixels of a row, from `start` on with `step` per pixel (in time), as RGBA into
  // `pixels` from `offset` on: `idle` between events, nothing outside the timeline.
  write(row, start, step, width, pixels, offset, idle) {
    const { panel } = this, { ticks } = panel;
    const from = start / panel.step, per = step / panel.step, length = panel.length / panel.step;
    let before = new Float64Array(4), after = new Float64Array(4);
    let i = panel.before(row, start);
    this.sumsAt(row, i, from, before);
    for (let x = 0; x < width; x++, offset += 4) {
      const tick = from + (x + 1) * per;
      if (tick <= 0 || tick - per >= length) continue;
      if (i + 1 < row.last && ticks[i + 1] <= tick) i = this.seek(row, i + 1, tick);
      this.sumsAt(row, i, tick, after);
      const rest = Math.max(0, per - (after[3] - before[3]));
      pixels[offset] = (after[0] - before[0] + rest * idle[0]) / per;
      pixels[offset + 1] = (after[1] - before[1] + rest * idle[1]) / per;
      pixels[offset + 2] = (after[2] - before[2] + rest * idle[2]) / per;
      pixels[offset + 3] = 255;
      [before, after] = [after, before];
    }
  }

  // The last event that starts at `tick` or before, given `i`, one of them: a few steps, then bisection.
  seek(row, i, tick) {
    const { ticks } = this.panel;
    for (let steps = 0; steps < 8; steps++) {
      if (i + 1 >= row.last || ticks[i + 1] > tick) return i;
      i++;
    }
    return i + 1 + lastAtMost(row.last - i - 1, (k) => ticks[i + 1 + k], tick);
  }

  // The sums over a row up to `tick`; `i` is its last event that has started.
  sumsAt(row, i, tick, result) {
    const { sums } = this;
    const at = 4 * Math.max(i, row.first);
    if (i < row.first) {
      for (let k = 0; k < 4; k++) result[k] = sums[at + k];
      return;
    }
    const ran = tick - this.panel.ticks[i], duration = this.panel.durations[i];
    const share = ran >= duration ? 1 : ran / duration;
    result[0] = sums[at] + (sums[at + 4] - sums[at]) * share;
    result[1] = sums[at + 1] + (sums[at + 5] - sums[at + 1]) * share;
    result[2] = sums[at + 2] + (sums[at + 6] - sums[at + 2]) * share;
    result[3] = sums[at + 3] + (sums[at + 7] - sums[at + 3]) * share;
  }
}

// Rows of pixels that are written together and then stretched to the height of their lanes.
class Strips {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d");
  }

  // entries: { shades, row, start, step, width, x, y, w, h }: the pixels to write, in pixels of the device, and their target.
  draw(target, entries, idle) {
    if (!entries.length) return;
    const width = Math.max(...entries.map((entry) => entry.width));
    if (this.canvas.width < width || this.canvas.height < entries.length) {
      this.canvas.width = Math.max(width, this.canvas.width);
      this.canvas.height = Math.max(entries.length, this.canvas.height);
    }
    const image = new ImageData(width, entries.length);
    entries.forEach((entry, k) => {
      entry.shades.write(entry.row, entry.start, entry.step, entry.width, image.data, 4 * width * k, idle);
    });
    this.context.putImageData(image, 0, 0);
    target.imageSmoothingEnabled = false;
    entries.forEach(({ width: w, x, y, w: across, h }, k) => target.drawImage(this.canvas, 0, k, w, 1, x, y, across, h));
  }
}
