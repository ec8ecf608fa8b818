"use strict";
// One editor with two doors. The page of --align has its rows in it, and saves a file at the end. The
// other one is served, and sends each change to `data.address` as somebody types.
//
// `kept` has what was typed and is not saved yet: {number: {known, fields}}, also in this browser's
// store, so that it outlives the tab, the browser and the server. `known`: the texts that may be
// saved for that row now: the one that was, and what was typed since, which another tab may find in
// the store and save. Without an address nothing is ever sent, and the store is all there is.
const data = JSON.parse(document.getElementById("data").textContent);
const rows = data.rows;
for (const row of rows) row.original = row.saved = row.text;
const STORE = `texts ${data.key} `;
const MARGIN = 1; // seconds that are heard and seen around a text
const DELAY = 200; // milliseconds from a key until it is sent
const LONGEST = 300; // seconds of sound that the page is sent at most
const KNOWN = 50; // texts of a row that are kept as known, at most
const $ = (id) => document.getElementById(id);
const kept = {};
const refused = new Set(); // numbers of rows that somebody else has changed
const lines = new Map(); // {number: {line, text, done, out, label}}
const player = new Audio();
let now = null; // the row that is worked on
let clip = { base: 0 }; // what the player has: from the second `base` of a file
let end = Infinity;
let sending = null;
let timer = 0;
let isBehind = false; // whether the last attempt to save has failed
let loading = {}; // the sound that is on its way: {address, made}

function make(name, text, parent, settings) {
  const element = Object.assign(document.createElement(name), settings);
  element.textContent = text;
  parent.append(element);
  return element;
}

function button(text, parent, does) {
  const made = make("button", text, parent, { type: "button" });
  made.addEventListener("click", does);
  return made;
}

// --- what is typed, and its way to the disk ---

const plain = (text) => text.split(/\s+/).filter(Boolean).join(" ");

function store(number) {
  try {
    if (kept[number]) localStorage.setItem(STORE + number, JSON.stringify(kept[number]));
    else localStorage.removeItem(STORE + number);
  } catch (error) { warn(`This browser keeps nothing: ${error.message}`); }
}

function recall() {
  for (const name of Object.keys(localStorage).filter((each) => each.startsWith(STORE))) {
    const number = Number(name.slice(STORE.length));
    const row = rows.find((each) => each.number === number);
    const entry = JSON.parse(localStorage.getItem(name));
    if (row) {
      kept[number] = entry;
      Object.assign(row, entry.fields);
    } else if (entry.fields.text) { // of a text that was split or joined elsewhere
      const said = make("div", `This was typed, and its text was split or joined elsewhere: `
        + `${entry.fields.text} `, document.body, { className: "theirs" });
      button("Forget it", said, () => { localStorage.removeItem(name); said.remove(); });
      $("list").before(said);
    }
  }
}

function change(row, fields) {
  const entry = kept[row.number] ??= { known: [row.saved], fields: {} };
  if ("text" in fields) entry.known.push(fields.text);
  entry.known.splice(1, entry.known.length - KNOWN);
  Object.assign(entry.fields, fields);
  Object.assign(row, fields);
  store(row.number);
  paint(row);
  count();
  timer ||= setTimeout(send, DELAY); // keys that follow do not put it off
}

async function post(changes) {
  const body = JSON.stringify({ ...data.table, changes });
  const headers = { "Content-Type": "application/json" };
  const keepalive = new Blob([body]).size < 60000; // bytes; more is not sent when a tab is closed
  const answer = await fetch(data.address, { method: "POST", body, headers, keepalive });
  if (answer.ok) return answer.json();
  const said = await answer.text();
  throw new Error((said.startsWith("{") ? JSON.parse(said).detail : said).slice(0, 300));
}

async function sendOnce() {
  const numbers = Object.keys(kept).map(Number).filter((each) => !refused.has(each));
  if (!data.address || !numbers.length) return;
  const sent = numbers.map((number) => ({ ...kept[number].fields }));
  const changes = numbers.map((number) => {
    const { known, fields } = kept[number];
    store(number); // another tab that has saved it has taken it out
    return { numbers: [number], known: [known], rows: [fields] };
  });
  const answers = await post(changes);
  answers.forEach((answer, place) => {
    const number = numbers[place];
    const row = rows.find((each) => each.number === number);
    if (answer.refused) {
      refuse(row, answer.rows[0]);
      return;
    }
    const { known, fields } = kept[number];
    const theirs = answer.rows[0].text;
    if (!("text" in sent[place]) && plain(theirs) !== plain(row.saved)) { // a mark replaces no text
      if ("text" in fields) { refuse(row, answer.rows[0]); return; }
      row.text = lines.get(number).text.value = theirs;
      paint(row);
    }
    row.saved = theirs;
    if (JSON.stringify(sent[place]) === JSON.stringify(fields)) delete kept[number];
    else kept[number].known = [row.saved, ...known.slice(known.lastIndexOf(sent[place].text) + 1)];
    store(number);
  });
}

async function send() {
  clearTimeout(timer);
  timer = 0;
  if (sending) { // what is typed meanwhile follows at once
    await sending.catch(() => {});
    if (Object.keys(kept).some((number) => !refused.has(Number(number)))) await send();
    return;
  }
  sending = sendOnce();
  try {
    await sending;
    if (isBehind) warn("");
    isBehind = false;
  } catch (error) {
    isBehind = true;
    const why = error instanceof TypeError ? "the page does not answer" : error.message;
    warn(`Not saved yet: ${why}. What you type is kept in this browser, and is saved when it can be.`);
    timer = setTimeout(send, 2000);
  } finally { sending = null; }
  count();
}

function refuse(row, theirs) {
  refused.add(row.number);
  const { line } = lines.get(row.number);
  const said = make("div", "", line, { className: "theirs" });
  if (!theirs) {
    said.textContent = "This text was split or joined elsewhere: copy what you need, and reload.";
    return;
  }
  said.textContent = `Changed elsewhere meanwhile; there it is: ${theirs.text} `;
  const settle = (isMine) => {
    refused.delete(row.number);
    said.remove();
    row.saved = theirs.text;
    const { fields } = kept[row.number];
    delete kept[row.number];
    store(row.number);
    if (isMine) change(row, { text: row.text, ...fields });
    else Object.assign(row, theirs);
    lines.get(row.number).text.value = row.text;
    paint(row);
    count();
  };
  button("Keep mine", said, () => settle(true));
  button("Take that", said, () => settle(false));
}

function warn(text) { $("warning").textContent = text; }

// --- the list ---

const isShown = {
  all: () => true,
  "not done": (row) => !row.edited,
  done: (row) => row.edited === "done",
  "left out": (row) => row.edited === "left out",
};

function count() {
  const number = (name) => rows.filter(isShown[name]).length;
  const waiting = Object.keys(kept).length;
  const asked = [...refused].map((at) => rows.findIndex((row) => row.number === at) + 1);
  const choose = asked.length ? ` (changed elsewhere: text ${asked.join(", ")})` : "";
  const saved = waiting ? `${waiting} not saved yet${choose}` : "all is saved";
  $("count").textContent = `${rows.length} texts, ${number("done")} done, `
    + `${number("left out")} left out` + (data.address ? `; ${saved}` : "");
}

function paint(row, place = rows.indexOf(row)) {
  const { line, label, done, out, text } = lines.get(row.number);
  line.className = "row";
  line.classList.toggle("now", row === now);
  line.classList.toggle("done", row.edited === "done");
  line.classList.toggle("out", row.edited === "left out");
  line.classList.toggle("mended", row.text !== row.original);
  done.ariaPressed = String(row.edited === "done");
  out.ariaPressed = String(row.edited === "left out");
  text.rows = Math.ceil((row.text.length + 1) / 60);
  const times = row.offset === undefined ? "" : ` ${row.offset.toFixed(1)} s`;
  const sure = row.confidence === undefined ? "" : `, confidence ${row.confidence}`;
  label.textContent = `${place + 1}: ${row.name}${times}${sure}`;
}

function show(row, place) {
  const line = make("div", "", $("list"));
  button("Play", line, () => {
    if (row === now && !player.paused) player.pause();
    else { select(row); play(row); }
  });
  const label = make("small", "", line);
  const text = make("textarea", "", line, { value: row.text, dir: "auto" });
  text.setAttribute("aria-label", "Text");
  text.addEventListener("input", () => change(row, { text: text.value }));
  text.addEventListener("focus", () => select(row));
  text.addEventListener("blur", () => { if (kept[row.number]) send(); });
  const mark = (what) => change(row, { edited: row.edited === what ? "" : what });
  const done = button("Done", line, () => mark("done"));
  const out = button("Leave out", line, () => mark("left out"));
  lines.set(row.number, { line, text, done, out, label });
  paint(row, place);
}

function draw() {
  $("list").replaceChildren();
  rows.forEach(show);
  filter();
  count();
}

function filter() {
  const wanted = $("search").value.toLowerCase();
  for (const row of rows) {
    const found = `${row.text} ${row.name}`.toLowerCase().includes(wanted);
    lines.get(row.number).line.hidden = !found || !isShown[$("which").value](row);
  }
}

function select(row) {
  if (row === now) return;
  const before = now;
  now = row;
  if (before && lines.has(before.number)) paint(before);
  paint(row);
  lines.get(row.number).line.append($("tools"));
  $("tools").hidden = row.offset === undefined && !data.address;
  for (const name of ["wave", "join", "split"]) $(name).hidden = !data.address;
  times();
  if (data.address) load(row).catch((error) => warn(`${row.name}: ${error.message}`));
}

function goTo(row) {
  if (!row) return;
  const { line, text } = lines.get(row.number);
  line.hidden = false;
  text.focus({ preventScroll: true });
  line.scrollIntoView({ block: "start" });
}

function next(isDone) {
  if (now && isDone && now.edited !== "done") change(now, { edited: "done" });
  const after = rows.slice(rows.indexOf(now) + 1);
  const isNext = (row) => (!isDone || !row.edited) && !lines.get(row.number).line.hidden;
  goTo(after.find(isNext) || rows.find((row) => !row.edited));
  if (now) play(now);
}

// --- sound, and the edges of a text in it ---

const from = (row) => row.offset || 0;
const to = (row) => (row.duration === undefined ? Infinity : from(row) + row.duration);

async function load(row) {
  const base = Math.max(0, from(row) - MARGIN);
  if (!data.address) {
    return `${row.source}#t=${from(row)},${to(row)}`;
  }
  const isWhole = to(row) === Infinity;
  const isLoaded = from(row) >= clip.base && (isWhole || to(row) <= clip.base + clip.seconds);
  if (clip.number === row.number && isLoaded) return clip.url;
  if (!row.source) throw new Error("there is no sound to hear.");
  const rest = isWhole ? "" : `&seconds=${to(row) + MARGIN - base}`;
  const address = `${row.source}&offset=${base}${rest}`;
  if (loading.address !== address) {
    const made = fetched(row, base, address);
    loading = { address, made };
    const forget = () => { if (loading.made === made) loading = {}; };
    made.then(forget, forget); // what the player has is in `clip`
  }
  return loading.made;
}

async function fetched(row, base, address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(await answer.text());
  const sound = await answer.arrayBuffer();
  const url = URL.createObjectURL(new Blob([sound], { type: "audio/wav" }));
  const decoded = await new OfflineAudioContext(1, 1, 24000).decodeAudioData(sound);
  if (row !== now) return url;
  URL.revokeObjectURL(clip.url);
  clip = { number: row.number, base, url, samples: decoded.getChannelData(0), seconds: decoded.duration };
  wave();
  return url;
}

async function play(row, at = from(row)) {
  try {
    const address = await load(row);
    if (row !== now) return; // another text was chosen meanwhile
    if (player.src !== new URL(address, location.href).href) player.src = address;
    end = to(row);
    player.currentTime = Math.max(0, at - clip.base);
    player.playbackRate = Number($("speed").value);
    await player.play();
  } catch (error) { warn(`${row.name}: ${error.message}`); }
}

function toggle() {
  if (!player.paused) { player.pause(); return; }
  const at = clip.base + player.currentTime;
  const isInside = player.src && at > from(now) && at < to(now) - 0.05;
  play(now, isInside ? at : from(now));
}

function slower(by) {
  const speed = $("speed");
  speed.selectedIndex = Math.min(Math.max(speed.selectedIndex + by, 0), speed.length - 1);
  player.playbackRate = Number(speed.value);
}

// The event "timeupdate" comes four times a second: the next word would be heard.
setInterval(() => {
  if (clip.base + player.currentTime >= end) player.pause();
  if (!player.paused) wave();
}, 20);

function times() {
  if (!now) return;
  $("begin").value = from(now).toFixed(2);
  $("stop").value = to(now) === Infinity ? "" : to(now).toFixed(2);
}

function edges(begin, stop) {
  const last = stop === Infinity && clip.samples ? clip.base + clip.seconds : stop;
  if (!(begin >= 0 && last > begin + 0.02) || last === Infinity) { times(); return; }
  if (stop === Infinity && isCutOff()) { times(); return; }
  change(now, { offset: round(begin), duration: round(last - begin) });
  times();
  wave();
}

const round = (seconds) => Math.round(seconds * 1000) / 1000;

// Whether the player has a part of a recording only, which would end where that does.
function isCutOff() {
  const isLong = to(now) === Infinity && clip.seconds > LONGEST - 1;
  if (isLong) {
    warn("Only the first five minutes of this recording are here: cut it first (ELAN, --align).");
  }
  return isLong;
}

function wave() {
  const canvas = $("wave");
  if (!clip.samples || !now) return;
  const width = canvas.width = canvas.clientWidth;
  const height = canvas.height = canvas.clientHeight;
  const draw = canvas.getContext("2d");
  const across = (seconds) => (seconds - clip.base) / clip.seconds * width;
  draw.fillStyle = "#bfdbfe";
  const right = Math.min(across(to(now)), width);
  draw.fillRect(across(from(now)), 0, right - across(from(now)), height);
  draw.fillStyle = "#1d4ed8";
  for (const edge of [across(from(now)), right]) draw.fillRect(edge - 1, 0, 3, height);
  draw.fillStyle = "#333";
  const step = clip.samples.length / width;
  for (let x = 0; x < width; x += 1) {
    let most = 0;
    const last = Math.min((x + 1) * step, clip.samples.length);
    for (let at = Math.floor(x * step); at < last; at += 1) {
      most = Math.max(most, Math.abs(clip.samples[at]));
    }
    draw.fillRect(x, height / 2 * (1 - most), 1, Math.max(1, most * height));
  }
  draw.fillStyle = "#b91c1c";
  draw.fillRect(across(clip.base + player.currentTime), 0, 2, height);
}

let held = ""; // the edge that a pointer moves
function pointed(event) {
  const share = Math.min(Math.max(event.offsetX / $("wave").clientWidth, 0), 1);
  return clip.base + share * clip.seconds;
}
function move(event) {
  if (held === "begin") edges(Math.min(pointed(event), to(now) - 0.03), to(now));
  else edges(from(now), pointed(event));
}
$("wave").addEventListener("pointerdown", (event) => {
  if (!clip.samples) return;
  const near = clip.seconds * 12 / $("wave").clientWidth;
  const at = pointed(event);
  const stop = Math.min(to(now), clip.base + clip.seconds);
  if (Math.abs(at - from(now)) < near) held = "begin";
  else if (Math.abs(at - stop) < near) held = "stop";
  else player.currentTime = at - clip.base;
  if (held) $("wave").setPointerCapture(event.pointerId);
  wave();
});
$("wave").addEventListener("pointermove", (event) => { if (held) move(event); });
$("wave").addEventListener("pointerup", () => {
  if (!held) return;
  held = "";
  clip.number = null; // there may be more to see around it now
  load(now).catch((error) => warn(`${now.name}: ${error.message}`));
});
for (const name of ["begin", "stop"]) {
  $(name).addEventListener("change", () => edges(Number($("begin").value),
    $("stop").value ? Number($("stop").value) : Infinity));
}

// --- splitting and joining ---

async function put(old, parts) {
  try {
    await send();
    const known = old.map((row) => [row.saved]);
    const [answer] = await post([{ numbers: old.map((row) => row.number), known, rows: parts }]);
    if (answer.refused) throw new Error("somebody else has changed this text: reload the page.");
    const made = answer.rows.map((row) => ({ ...old[0], ...row, saved: row.text }));
    rows.splice(rows.indexOf(old[0]), old.length, ...made);
    document.body.append($("tools"));
    now = null;
    draw();
    refused.clear(); // what they asked is asked again
    goTo(made[0]);
    send();
  } catch (error) { warn(`Not split or joined: ${error.message}`); }
}

$("split").addEventListener("click", () => {
  const row = now;
  const at = clip.base + player.currentTime;
  const stop = Math.min(to(row), clip.base + clip.seconds);
  if (!(at > from(row) + 0.05 && at < stop - 0.05)) {
    warn("Put the red line between two words first: click into the waveform.");
    return;
  }
  if (isCutOff()) return;
  const caret = lines.get(row.number).text.selectionStart;
  put([row], [
    { text: row.text.slice(0, caret), offset: from(row), duration: round(at - from(row)) },
    { text: row.text.slice(caret), offset: round(at), duration: round(stop - at), edited: "" },
  ]);
});

$("join").addEventListener("click", () => {
  const after = rows[rows.indexOf(now) + 1];
  if (!after || after.source !== now.source || after.duration === undefined) {
    warn("The next text is of another recording, or has no times.");
    return;
  }
  if (lines.get(after.number).line.hidden) {
    warn("The next text is not shown: show all texts first.");
    return;
  }
  const text = plain(`${now.text} ${after.text}`);
  put([now, after], [{ text, edited: "", offset: from(now), duration: to(after) - from(now) }]);
});

// --- the header and the keys ---

function download() {
  const written = [];
  for (const row of [...rows].sort((one, other) => one.number - other.number)) {
    if (row.edited === "left out" || !plain(row.text)) continue;
    const { offset, duration } = row;
    written.push(JSON.stringify({ ...row.record, text: plain(row.text), offset, duration }) + "\n");
  }
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([written.join("")], { type: "application/json" }));
  link.download = data.name;
  link.click();
}

const KEYS = {
  Escape: toggle,
  F1: () => play(now, Math.max(from(now), clip.base + player.currentTime - 2)),
  F3: () => slower(-1),
  F4: () => slower(1),
};
const save = data.address ? send : download;
// The key S, or the one in its place where the alphabet has none.
const isS = ({ key, code }) => key.toLowerCase() === "s" || (key > "~" && code === "KeyS");
addEventListener("keydown", (event) => {
  if (event.isComposing) return; // a key of an input method
  const isCommand = event.ctrlKey || event.metaKey;
  if (isCommand && event.key === "Enter") next(!event.shiftKey);
  else if (isCommand && isS(event)) save();
  else if (now && KEYS[event.key] && !isCommand) KEYS[event.key]();
  else return;
  event.preventDefault();
});
$("save").addEventListener("click", () => save());
$("next").addEventListener("click", () => next(false));
$("search").addEventListener("input", filter);
$("which").addEventListener("change", filter);
$("jump").addEventListener("change", () => goTo(rows[Number($("jump").value) - 1]));
addEventListener("pagehide", () => sendOnce().catch(() => {}));
document.addEventListener("visibilitychange", () => { if (document.hidden) send(); });

recall();
draw();
if (data.address) {
  send();
  goTo(rows.find((row) => !row.edited));
}
