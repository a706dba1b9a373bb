// Two schedules of the same passes: how many places later each pass stands in the order of its device than in the other.

// One list per panel, by number of the pass; null unless there are two panels whose devices run the same passes.
function movesOf(panels) {
  if (panels.length !== 2) return null;
  const rows = panels.map((panel) => panel.rows.filter((row) => row.shows === COMPUTE));
  if (rows[0].length !== rows[1].length) return null;
  const moves = panels.map((panel) => new Int32Array(panel.count));
  for (const [k, row] of rows[0].entries()) {
    const other = rows[1][k];
    const places = new Map();
    for (let i = other.first; i < other.last; i++) places.set(panels[1].label(i), i);
    if (row.last - row.first !== other.last - other.first || places.size !== other.last - other.first) return null;
    for (let i = row.first; i < row.last; i++) {
      const there = places.get(panels[0].label(i));
      if (there === undefined) return null;
      moves[0][i] = i - row.first - (there - other.first);
      moves[1][there] = -moves[0][i];
    }
  }
  return moves.some((column) => column.some((places) => places)) ? moves : null;
}

// As in a box: arrows point to where it stands.
function moveMark(places) {
  return places ? `${places < 0 ? "◂" : "▸"}${Math.abs(places)}` : "";
}

function moveText(scene, panel, i) {
  const places = scene.move(panel, i);
  if (!places) return "";
  const other = scene.panels[1 - panel.number];
  return `${Math.abs(places)} ${Math.abs(places) === 1 ? "place" : "places"} ${places < 0 ? "earlier" : "later"} than in ${other.name}`;
}
