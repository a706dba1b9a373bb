// Numbers as text, as in figures.py.

const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];

class Format {
  // seconds: per unit of time, or null. length: the longest timeline, which decides the unit of all times.
  constructor(seconds, length) {
    const size = (seconds ?? 1) * length;
    const [factor, name] = UNITS.find(([least]) => size >= least) ?? UNITS[0];
    this.factor = seconds ? seconds / factor : 1;
    this.name = seconds ? ` ${name}` : "";
    this.resolution = (length * this.factor) / 1e6;
  }

  // A moment, with digits for a millionth of the whole, or a hundredth of `span`.
  time(value, span = Infinity) {
    const fine = Math.max(Math.min(this.resolution, (span * this.factor) / 100), 1e-12);
    return trimmed((value * this.factor).toFixed(Math.min(12, Math.max(0, Math.ceil(-Math.log10(fine)))))) + this.name;
  }

  duration(value) {
    return fourDigits(value * this.factor) + this.name;
  }
}

function fourDigits(value) {
  if (value === 0) return "0";
  const digits = Math.max(0, 3 - Math.floor(Math.log10(Math.abs(value))));
  return digits > 9 ? value.toExponential(2) : trimmed(value.toFixed(digits));
}

function trimmed(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function bytesText(value) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  while (Math.abs(value) >= 1024 && power < names.length - 1) {
    value /= 1024;
    power++;
  }
  return `${fourDigits(value)} ${names[power]}`;
}

function amountText(panel, value) {
  return panel.bytes ? bytesText(value) : `${fourDigits(value)} ${panel.held}`;
}

// Short form, beside the curve of a device.
function peakText(panel, value) {
  return panel.bytes ? bytesText(value) : `peak ${fourDigits(value)}`;
}

// Returns the next of 1, 2, 5, 10, ... from `step` on.
function roundStep(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  return [1, 2, 5, 10].find((factor) => factor * power >= step * (1 - 1e-9)) * power;
}
