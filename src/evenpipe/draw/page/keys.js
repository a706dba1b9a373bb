// The keyboard: every action has a key, and passes can be walked one by one.

class Keys {
  constructor(page) {
    this.page = page;
    this.actions = actionsOf(page);
    document.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { stage } = this.page, { target, key } = event;
    if (target.tagName === "INPUT") {
      if (key === "Escape") stage.focus();
      return;
    }
    // Arrows scroll the page, unless the picture or nothing has the focus.
    if (key.startsWith("Arrow") && target !== stage && target !== document.body) return;
    if (!Object.hasOwn(this.actions, key)) return;
    event.preventDefault();
    this.actions[key]();
  }
}

function actionsOf(page) {
  const { view } = page.scene;
  const show = (start, span) => { view.show(start, span); page.changed(); };
  const pan = (part) => { view.pan(view.span * part); page.changed(); };
  const scroll = (pixels) => scrollBy(0, pixels);
  const toggle = (name) => { if (!get(name).hidden) page.toggle(name); };
  return {
    "+": () => page.zoom(0.6), "=": () => page.zoom(0.6), "-": () => page.zoom(1 / 0.6), 0: () => page.fit(),
    ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), ArrowUp: () => scroll(-60), ArrowDown: () => scroll(60),
    Home: () => show(0, view.span), End: () => show(view.length, view.span),
    w: () => page.follow(), b: () => page.back(), ",": () => page.neighbour(-1), ".": () => page.neighbour(1),
    c: () => page.critical(), m: () => toggle("memory"), t: () => toggle("transfers"), s: () => toggle("sides"),
    d: () => toggle("moves"),
    "/": () => get("query").select(), "?": () => page.help(), Escape: () => page.release(),
  };
}
