// From a pass back to the start: what it waited for, what that waited for, and so on.

// Numbers of events, `i` first. A chain has no cycle, but a faulty measured one might have.
function chainFrom(panel, i) {
  const events = [];
  const seen = new Set();
  for (let at = i; at >= 0 && !seen.has(at); at = panel.cause(at)) {
    seen.add(at);
    events.push(at);
  }
  return events;
}

// The time of each kind in a chain, and of the waits in between: [[letters, time], ...], longest first.
function sharesOf(panel, events) {
  const times = new Map();
  for (const i of events) times.set(panel.letters(i), (times.get(panel.letters(i)) ?? 0) + panel.duration(i));
  return [...times].filter(([, time]) => time > 0).sort((a, b) => b[1] - a[1]);
}
