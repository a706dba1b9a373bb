// One timeline: its events as columns, by number, in rows in which nothing overlaps.

const COMPUTE = 0, TRANSFERS = 1, BESIDE = 2; // what a row shows (encode.py)

class Panel {
  static async read(data, shared, number) {
    const panel = new Panel();
    Object.assign(panel, { number, shared, ...data });
    const columns = await columnsOf(data.columns, data.count, 11);
    [panel.ticks, panel.durations, panel.look, panel.stage, panel.microbatch, panel.slice] = columns;
    [panel.causes, panel.resource, panel.exchanges, panel.slacks, panel.firsts] = columns.slice(6);
    summed(panel.ticks);
    summed(panel.microbatch);
    panel.rows = rowsOf(data);
    await panel.readCurves(data.curves);
    const most = (column) => column.reduce((highest, number) => Math.max(highest, number), 0);
    panel.digits = panel.unitText(most(panel.microbatch), most(panel.slice)).length;
    panel.timed = countsOfTimed(panel.durations);
    panel.shortest = shortest(panel.durations) * data.step;
    return panel;
  }

  async readCurves(data) {
    const count = data.firsts[data.firsts.length - 1];
    const [times, values] = await columnsOf(data.columns, count, 2);
    this.curves = { ...data, times: summed(times), values: summed(values) };
  }

  start(i) { return this.ticks[i] * this.step; }
  end(i) { return (this.ticks[i] + this.durations[i]) * this.step; }
  duration(i) { return this.durations[i] * this.step; }
  slack(i) { return this.slacks[i] < 0 ? null : this.slacks[i] * this.step; } // null: not known
  first(i) { return this.firsts[i] ? i - this.firsts[i] : -1; } // the pass that waits for it first; -1: the end
  exchange(i) { return this.exchanges[i] * this.step; } // in which tensor ranks only exchange rows
  kind(i) { return this.shared.looks[this.look[i]][0]; }
  letters(i) { return this.shared.kinds[this.kind(i)][0]; }
  words(i) { return this.shared.kinds[this.kind(i)][1]; }

  // The text of a pass, as in an order: 2F3.
  label(i) {
    if (this.texts[i]) return this.texts[i];
    const stage = this.stage[i] < 0 ? "" : this.stage[i];
    return `${stage}${this.letters(i)}${this.unit(i)}`;
  }

  // The microbatch of an event with its slice: 3, or 3.1.
  unit(i) { return this.microbatch[i] < 0 ? "" : this.unitText(this.microbatch[i], this.slice[i]); }
  unitText(microbatch, slice) { return slice ? `${microbatch}.${slice}` : String(microbatch); }

  // The text in the box of a pass, and its short form; for each of passes that run as one.
  parts(i) {
    if (this.texts[i]?.startsWith("(")) return [...this.texts[i].matchAll(/[^(;]*?[A-Z]+(\d+[.\d]*)(?=[;)])/g)];
    return [[this.label(i), this.unit(i)]];
  }

  belongsTo(i, microbatch) {
    if (!this.texts[i]) return this.microbatch[i] === microbatch;
    return [...this.texts[i].matchAll(/[A-Z](\d+)/g)].some((match) => Number(match[1]) === microbatch);
  }

  rowOf(i) {
    return this.rows[lastAtMost(this.rows.length, (row) => this.rows[row].first, i)];
  }

  // The last event of a row that starts at `time` or before; row.first - 1 if there is none.
  before(row, time) {
    const tick = time / this.step;
    return row.first + lastAtMost(row.last - row.first, (k) => this.ticks[row.first + k], tick);
  }

  // Numbers of the events of a row that are visible between two times: [first, last).
  visible(row, start, end) {
    let first = Math.max(row.first, this.before(row, start));
    while (first > row.first && this.end(first - 1) > start) first--; // events of length 0 at the same moment
    if (first < row.last && this.end(first) < start) first++;
    return [first, this.before(row, end) + 1];
  }

  // The number of events of a row that take time.
  timedIn(row) { return this.timed[row.last] - this.timed[row.first]; }

  // The cause of an event: the number of another event, or -1.
  cause(i) {
    if (this.causes[i]) return i - this.causes[i];
    if (this.resource[i] || this.unknown[i]) return -1;
    return this.followsDirectly(i) ? i - 1 : -1;
  }

  // If no cause is known, as in measured timelines: whether the previous event in its row ends where it starts.
  followsDirectly(i) {
    return i > this.rowOf(i).first && Math.abs(this.ticks[i] - this.ticks[i - 1] - this.durations[i - 1]) <= 1;
  }

  // The idle time of its device before an event.
  idleBefore(i) {
    const row = this.rowOf(i);
    return i > row.first ? Math.max(0, this.start(i) - this.end(i - 1)) : this.start(i);
  }

  // The transfer or copy that its device waits for, idle, before a compute pass; -1 if there is none.
  awaited(i) {
    const cause = this.cause(i);
    return cause >= 0 && this.idleBefore(i) > this.step && this.rowOf(cause).shows !== COMPUTE ? cause : -1;
  }

  memoryAt(device, time) {
    const { firsts, times, values, unit } = this.curves;
    const place = lastAtMost(firsts[device + 1] - firsts[device], (k) => times[firsts[device] + k], time / this.step);
    return place < 0 ? 0 : values[firsts[device] + place] * unit;
  }

  // The highest memory of a device in each of `columns` intervals of `step`, from `start` on.
  highestPerColumn(device, start, step, columns) {
    const { firsts, times, values, unit } = this.curves;
    const begin = firsts[device], end = firsts[device + 1];
    const heights = new Float64Array(columns);
    let k = begin + lastAtMost(end - begin, (place) => times[begin + place] * this.step, start);
    let held = k < begin ? 0 : values[k];
    for (let column = 0; column < columns; column++) {
      const limit = (start + (column + 1) * step) / this.step;
      let most = held;
      while (k + 1 < end && times[k + 1] < limit) {
        held = values[++k];
        if (held > most) most = held;
      }
      heights[column] = most * unit;
    }
    return heights;
  }

  // The compute pass that ends last; -1 when there is none.
  lastToEnd() {
    let last = -1;
    for (const row of this.rows) {
      if (row.shows === COMPUTE && row.last > row.first && (last < 0 || this.end(row.last - 1) > this.end(last))) {
        last = row.last - 1;
      }
    }
    return last;
  }
}

function rowsOf(data) {
  return data.rows.map(([device, shows, first], k) => {
    const last = k + 1 < data.rows.length ? data.rows[k + 1][2] : data.count;
    return { device, shows, first, last };
  });
}

// The largest k below `count` with value(k) <= limit, where value grows; -1 when there is none.
function lastAtMost(count, value, limit) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (value(middle) <= limit) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// counts[i]: how many of the first i events take time.
function countsOfTimed(durations) {
  const counts = new Int32Array(durations.length + 1);
  for (let i = 0; i < durations.length; i++) counts[i + 1] = counts[i] + (durations[i] > 0 ? 1 : 0);
  return counts;
}

function shortest(durations) {
  let least = Infinity;
  for (const duration of durations) if (duration > 0 && duration < least) least = duration;
  return Number.isFinite(least) ? least : 1;
}
