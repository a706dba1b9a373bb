// Colours: those of the page, from its style sheet, and those of kinds, for a light or a dark page.

class Theme {
  constructor(looks) {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ground", "text", "faint", "line", "idle", "accent", "memory", "grid", "selected"]) {
      this[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.dark = matchMedia("(prefers-color-scheme: dark)").matches;
    this.idleChannels = channels(this.idle);
    this.looks = looks.map(([, colours]) => colours.map((four) => this.look(four)));
  }

  // A colour, and its faint form while another microbatch is highlighted.
  look([light, dark, inkOnLight, inkOnDark]) {
    const colour = this.dark ? dark : light;
    const back = channels(colour).map((value, k) => Math.round(value + (this.idleChannels[k] - value) * 0.8));
    return { colour, ink: this.dark ? inkOnDark : inkOnLight, back: `rgb(${back.join(" ")})` };
  }
}

function channels(colour) {
  return [1, 3, 5].map((place) => parseInt(colour.slice(place, place + 2), 16));
}
