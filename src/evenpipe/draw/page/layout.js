// Positions: a box per panel, with a lane per row of events and per curve of memory.

const AXIS = 26, HEADING = 30, GUTTER = 76, EDGE = 10;

// options: memory, transfers, sides (switches), width and height of the available space.
function layoutOf(panels, options) {
  const columns = options.sides ? panels.length : 1;
  const width = Math.max(140, options.width / columns - GUTTER - EDGE);
  const height = laneHeight(panels, options, columns);
  const boxes = [];
  let top = 0, bottom = 0;
  panels.forEach((panel, k) => {
    const left = (options.sides ? (options.width / columns) * k : 0) + GUTTER;
    const box = boxOf(panel, options, { left, width, top: options.sides ? 0 : top, height });
    boxes.push(box);
    top = box.bottom;
    bottom = Math.max(bottom, box.bottom);
  });
  return { boxes, height: bottom + 8 };
}

function laneHeight(panels, options, columns) {
  const devices = panels.reduce((most, panel) => (columns > 1 ? Math.max(most, panel.devices) : most + panel.devices), 0);
  const extra = 6 + (options.memory ? 12 : 0) + (options.transfers ? 10 : 0);
  return Math.round(Math.min(26, Math.max(14, options.height / Math.max(1, devices) - extra)));
}

function boxOf(panel, options, place) {
  const box = { panel, ...place, lanes: [], labels: [] };
  let y = place.top + HEADING;
  for (const group of groupsOf(panel)) {
    box.labels.push({ device: group.device, y: y + place.height / 2 });
    for (const row of group.rows) {
      if (row.shows !== COMPUTE && !options.transfers) continue;
      const height = row.shows === COMPUTE ? place.height : Math.max(6, Math.round(place.height * 0.34));
      box.lanes.push({ row, device: group.device, top: y, height });
      y += height + 1;
    }
    if (options.memory) {
      const height = Math.round(place.height * 0.62);
      box.lanes.push({ row: null, device: group.device, top: y, height });
      y += height + 1;
    }
    y += Math.max(3, Math.round(place.height * 0.22));
  }
  box.bottom = y + 4;
  box.laneOf = new Map(box.lanes.filter((lane) => lane.row).map((lane) => [lane.row, lane]));
  return box;
}

// Rows of each device together, compute first.
function groupsOf(panel) {
  const groups = Array.from({ length: panel.devices }, (_, device) => ({ device, rows: [] }));
  for (const row of panel.rows) groups[row.device].rows.push(row);
  return groups;
}

// Lanes between two heights; they are in order.
function lanesBetween(box, top, bottom) {
  const first = lastAtMost(box.lanes.length, (k) => box.lanes[k].top + box.lanes[k].height, top) + 1;
  const last = lastAtMost(box.lanes.length, (k) => box.lanes[k].top, bottom);
  return box.lanes.slice(first, last + 1);
}

function laneAt(box, y) {
  return lanesBetween(box, y - 1, y).find((lane) => y >= lane.top && y <= lane.top + lane.height);
}
