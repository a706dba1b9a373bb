// Descriptions of a pass: the tooltip, and the line below the picture. All text becomes text nodes, never markup.

const AWAITED = {
  start: "nothing",
  device: "its device, busy with",
  pass: "the end of", // the data of a transfer or a copy is ready then
  transfer: "the arrival of",
  communicator: "its communicator, busy with",
  link: "the link, busy with",
  engine: "the copy engine, busy with",
};

function element(name, text = "", className = "") {
  const node = document.createElement(name);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

// The cause of an event, in words; null if not known.
function awaitedText(panel, i) {
  const cause = panel.cause(i);
  const name = panel.shared.resources[panel.resource[i]];
  if (cause >= 0) {
    const there = panel.rowOf(cause).device, here = panel.rowOf(i);
    const ready = here.shows !== COMPUTE && panel.rowOf(cause).shows === COMPUTE;
    const what = ready ? AWAITED.pass : AWAITED[name] ?? (name || AWAITED.device);
    return `${what} ${panel.label(cause)}${there === here.device ? "" : ` on device ${there}`}${sourceText(panel, cause)}`;
  }
  if (panel.unknown[i]) return `${AWAITED[name] ?? name} ${panel.unknown[i]}`;
  return name ? AWAITED[name] ?? name : null;
}

// The source of a transfer, if it started as soon as its data was ready; empty for a pass.
function sourceText(panel, i) {
  const source = panel.cause(i);
  if (panel.rowOf(i).shows !== TRANSFERS || source < 0 || panel.rowOf(source).shows !== COMPUTE) return "";
  return `, from ${panel.label(source)} on device ${panel.rowOf(source).device}`;
}

function partsOf(panel, i) {
  const parts = [`device ${panel.rowOf(i).device}`];
  if (panel.stage[i] >= 0) parts.push(`stage ${panel.stage[i]}`);
  if (panel.microbatch[i] >= 0) parts.push(`microbatch ${panel.microbatch[i]}`);
  if (panel.slice[i]) parts.push(`slice ${panel.slice[i]}`);
  return parts.join(", ");
}

function takesText(panel, i, format) {
  const whole = format.duration(panel.duration(i));
  return panel.exchange(i) ? `${whole}, of which ${format.duration(panel.exchange(i))} tensor collectives` : whole;
}

// How much later an event could end without a longer step, and what waits for it first; null if not known.
function slackText(panel, i, format) {
  const slack = panel.slack(i), first = panel.first(i);
  if (slack === null) return null;
  const there = first < 0 ? -1 : panel.rowOf(first).device;
  const what = first < 0 ? "the end of the step" : `${panel.label(first)}${there === panel.rowOf(i).device ? "" : ` on device ${there}`}`;
  if (slack) return `${format.duration(slack)}, until ${what}${first < 0 ? "" : " must start"}`;
  return first < 0 ? "nothing: the step ends with it" : `nothing: ${what} waits for it`;
}

// Rows of the tooltip: [name, text].
function factsOf(scene, panel, i) {
  const { format } = scene;
  const facts = [
    ["where", partsOf(panel, i)],
    ["time", `${format.time(panel.start(i))} to ${format.time(panel.end(i))}`],
    ["takes", takesText(panel, i, format)],
  ];
  const awaited = awaitedText(panel, i);
  const idle = panel.idleBefore(i);
  if (awaited) facts.push(["waited for", awaited]);
  if (panel.rowOf(i).shows === COMPUTE && idle > panel.step) facts.push(["idle before", format.duration(idle)]);
  const slack = slackText(panel, i, format);
  if (slack) facts.push(["could end later by", slack]);
  if (scene.move(panel, i)) facts.push(["order", moveText(scene, panel, i)]);
  return facts;
}

function fillTip(tip, heading, words, facts) {
  const title = element("div");
  title.append(element("strong", heading), words ? ` ${words}` : "");
  const table = element("table");
  for (const [what, text] of facts) {
    const row = element("tr");
    row.append(element("th", what), element("td", text));
    table.append(row);
  }
  tip.replaceChildren(title, table);
}

function fillMemoryTip(tip, { panel, lane, time }, format) {
  const { device } = lane;
  const facts = [["time", format.time(time)], ["peak", amountText(panel, panel.curves.peaks[device])]];
  if (panel.limit) facts.push(["limit", amountText(panel, panel.limit[device])]);
  fillTip(tip, amountText(panel, panel.memoryAt(device, time)), `on device ${device}`, facts);
}

// Placed beside the pointer, always inside the window.
function placeTip(tip, x, y) {
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 18 + width > innerWidth ? x - 14 - width : x + 18;
  const top = y + 18 + height > innerHeight ? y - 14 - height : y + 18;
  tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}

// The line below the picture: the selected pass, buttons to follow its chain, and the parts of the chain.
function fillChosen(line, scene, actions) {
  line.replaceChildren();
  if (!scene.kept) {
    line.append(element("span", "Point at a pass to see what it waited for; click to select it.", "faint"));
    return;
  }
  const { panel, i } = scene.kept;
  const awaited = awaitedText(panel, i);
  const title = element("strong", panel.label(i));
  const facts = `${panel.words(i)}, ${partsOf(panel, i)}, ${scene.format.time(panel.start(i))} to ${scene.format.time(panel.end(i))}`;
  line.append(title, ` ${facts}${awaited ? `; waited for ${awaited}` : ""}`);
  const cause = scene.shownCause(panel, i);
  if (cause >= 0) line.append(button(`Go to ${panel.label(cause)} (w)`, actions.follow));
  if (scene.history.length) line.append(button("Back (b)", actions.back));
  line.append(button("Clear (Esc)", actions.release), chainText(panel, scene));
}

function chainText(panel, scene) {
  const { events } = scene.chain;
  if (events.length < 2) return element("span");
  const shares = sharesOf(panel, events).slice(0, 6).map(([letters, time]) => `${letters} ${scene.format.duration(time)}`);
  return element("span", `Chain of ${events.length} back to ${scene.format.time(panel.start(events[events.length - 1]))}: ${shares.join(", ")}`, "faint");
}

function button(text, action) {
  const node = element("button", text);
  node.type = "button";
  node.addEventListener("click", action);
  return node;
}
