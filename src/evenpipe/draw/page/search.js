// Queries of the search box: a pass or transfer (2F3, S0, 2SEND_F0), a microbatch (3), a device (device 3).

const WORD = /^(\d*)([A-Za-z_]+?)(\d+)(?:\.(\d+))?$/;

// { events: [[panel, i], ...] }, { microbatch }, { device }, or null for anything else.
function searched(query, panels) {
  const text = query.trim();
  if (/^\d+$/.test(text)) return { microbatch: Number(text) };
  const device = /^(?:device|d)\s*(\d+)$/i.exec(text);
  if (device) return { device: Number(device[1]) };
  const word = WORD.exec(text.replace(/\s/g, ""));
  if (!word) return null;
  return { events: panels.flatMap((panel) => matches(panel, word).map((i) => [panel, i])) };
}

function matches(panel, [text, stage, letters, microbatch, slice]) {
  const wanted = [stage === "" ? -1 : Number(stage), Number(microbatch), Number(slice ?? 0)];
  const looks = panel.shared.looks.map(([kind]) => panel.shared.kinds[kind][0] === letters.toUpperCase());
  const found = [];
  for (let i = 0; i < panel.count; i++) {
    const plain = panel.stage[i] === wanted[0] && panel.microbatch[i] === wanted[1] && panel.slice[i] === wanted[2];
    if (plain ? looks[panel.look[i]] : panel.texts[i]?.split(/[();]/).includes(text.toUpperCase())) found.push(i);
  }
  return found;
}
