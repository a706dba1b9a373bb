// The kinds in use, each with its colours; a click hides or shows one, with alt all others.

function fillLegend(holder, scene, changed) {
  const kinds = kindsOf(scene.panels, scene.options.transfers);
  const buttons = kinds.map(({ kind, looks }) => {
    const node = element("button");
    node.type = "button";
    node.dataset.kind = scene.shared.kinds[kind][0];
    const [letters, words] = scene.shared.kinds[kind];
    node.title = `${words}. Click: hide or show. Alt and click: only this one, or all again.`;
    node.append(sample(scene.theme, looks), element("strong", letters), element("span", words));
    node.setAttribute("aria-pressed", String(!scene.hidden.has(kind)));
    node.addEventListener("click", (event) => {
      toggle(scene.hidden, kinds.map((entry) => entry.kind), kind, event.altKey);
      changed();
    });
    return node;
  });
  holder.replaceChildren(...buttons, ...notesOf(scene));
}

// What needs no switch: thin bars of waits, the line of a limit, shades, and marks of moved passes.
function notesOf(scene) {
  const { theme, shared, options, panels } = scene;
  const notes = awaitedOf(panels).map((look) => {
    const [letters, words] = shared.kinds[shared.looks[look][0]];
    return [thinSample(theme, theme.looks[look][0].colour, 4), `waits for ${letters}`, words];
  });
  if (options.memory && shared.limit) notes.push([thinSample(theme, theme.text, 1), shared.limit]);
  if (shared.shades) notes.push(["", shared.shades]);
  if (options.moves) notes.push(["", "◂3: 3 places earlier on its device than in the other schedule; ▸: later; faint: the same place"]);
  return notes.map(([picture, text, words]) => {
    const node = element("span", "", "entry");
    node.title = words ?? "";
    node.append(picture, text);
    return node;
  });
}

// The looks of what ends the waits of devices, by number of their kind.
function awaitedOf(panels) {
  const looks = new Map();
  for (const panel of panels) {
    for (const row of panel.rows) {
      for (let i = row.first; row.shows === COMPUTE && i < row.last; i++) {
        const cause = panel.awaited(i);
        if (cause >= 0) looks.set(panel.kind(cause), panel.look[cause]);
      }
    }
  }
  return [...looks].sort((a, b) => a[0] - b[0]).map(([, look]) => look);
}

function thinSample(theme, colour, height) {
  const node = document.createElement("canvas");
  [node.width, node.height] = [16, 14];
  const context = node.getContext("2d");
  context.fillStyle = theme.idle;
  context.fillRect(0, 0, 16, 14);
  context.fillStyle = colour;
  context.fillRect(0, 7 - height / 2, 16, height);
  return node;
}

// Kinds in the visible rows, with the looks of each from the first stage of a device to its last.
function kindsOf(panels, beside) {
  const used = new Set();
  for (const panel of panels) {
    for (const row of panel.rows) {
      if (row.shows !== COMPUTE && !beside) continue;
      for (let i = row.first; i < row.last; i++) used.add(panel.look[i]);
    }
  }
  const byKind = new Map();
  panels[0].shared.looks.forEach(([kind], look) => {
    if (used.has(look)) byKind.set(kind, [...(byKind.get(kind) ?? []), look]);
  });
  return [...byKind].sort((a, b) => a[0] - b[0]).map(([kind, looks]) => ({ kind, looks }));
}

function toggle(hidden, all, kind, alone) {
  if (!alone) {
    if (!hidden.delete(kind)) hidden.add(kind);
    return;
  }
  const others = all.filter((other) => other !== kind);
  const isAlone = !hidden.has(kind) && others.every((other) => hidden.has(other));
  hidden.clear();
  if (!isAlone) others.forEach((other) => hidden.add(other));
}

function sample(theme, looks) {
  const canvas = document.createElement("canvas");
  const shades = [...new Set(looks.map((look) => theme.looks[look].map(({ colour }) => colour).join()))].slice(0, 4);
  const scale = window.devicePixelRatio || 1;
  canvas.width = 16 * scale;
  canvas.height = 14 * scale;
  canvas.style.width = "16px";
  canvas.style.height = "14px";
  const context = canvas.getContext("2d");
  shades.forEach((colours, k) => {
    const [width, parts] = [canvas.width / shades.length, colours.split(",")];
    parts.forEach((colour, part) => {
      context.fillStyle = colour;
      context.fillRect(k * width, (part * canvas.height) / parts.length, width, canvas.height / parts.length);
    });
  });
  return canvas;
}
