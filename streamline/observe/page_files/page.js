// Draws each update. All text that comes from the stream is set as text, never as markup.
"use strict";

const byId = (id) => document.getElementById(id);
let chosen = null; // "name, rank" of the stream that is shown
let latest = null;

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children); // strings become text
  return node;
}

const percent = (share) => `${Math.round(100 * share)} %`;

function number(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 10 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toPrecision(2);
}

function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (bytes < 999.5) return `${bytes < 10 && unit !== "B" ? bytes.toFixed(1) : Math.round(bytes)} ${unit}`;
    bytes /= 1000;
  }
  return `${Math.round(bytes)} PB`;
}

function clock(seconds) {
  const s = Math.max(0, Math.round(seconds));
  const [days, rest] = [Math.floor(s / 86400), s % 86400];
  const two = (value) => String(value).padStart(2, "0");
  const time = `${Math.floor(rest / 3600)}:${two(Math.floor(rest / 60) % 60)}:${two(rest % 60)}`;
  return days ? `${days} d ${time}` : time;
}

function facts(stream, now) {
  const list = [
    ["consumer waits", percent(stream.waits), `${percent(stream.waits_in_all)} since the start`],
    ["items/s", number(stream.rate), ""],
    ["items", number(stream.items), stream.length === null ? "" : `of ${number(stream.length)}`],
    ["epoch", String(stream.epoch), `open for ${clock(stream.elapsed_s)}`],
  ];
  if (stream.length !== null) {
    list.push(["time left", stream.eta_s === null ? "–" : clock(stream.eta_s), `${percent(stream.items / Math.max(1, stream.length))} done`]);
  }
  const last = stream.snapshot;
  if (last.saved_at) {
    const bytes = last.bytes ? `, ${size(last.bytes)}` : "";
    list.push(["last snapshot", `${clock(now - last.saved_at)} ago`, `${last.where}${bytes}`]);
  } else {
    list.push(["last snapshot", last.taken_at ? `${clock(now - last.taken_at)} ago` : "none", last.taken_at ? "taken, not saved by streamline" : "in this epoch"]);
  }
  byId("facts").replaceChildren(...list.map(([name, value, small]) => make(
    "div", "", make("dt", "", name), make("dd", "", value, make("small", "", small)))));
  byId("done").hidden = stream.length === null;
  byId("done").firstElementChild.style.width = stream.length ? percent(Math.min(1, stream.items / stream.length)) : "0";
}

function atOnce(stage) {
  const calls = stage.slots > stage.workers ? ` × ${number(stage.slots / stage.workers)} calls` : "";
  if (!stage.in_workers) return `after the workers${calls}`;
  return `${number(stage.workers)} worker${stage.workers === 1 ? "" : "s"}${calls}`;
}

function stageBox(stage, worst) {
  const times = make("div", "times");
  for (const [name, share] of [["busy", stage.busy], ["no-input", stage.no_input], ["no-room", stage.no_room]]) {
    const bar = make("i", name);
    bar.style.width = `${100 * share}%`;
    times.append(bar);
  }
  const box = make("div", stage.label === worst ? "stage worst" : "stage",
    make("b", "", stage.label), times,
    make("span", "rate", `${number(stage.rate)}/s · busy ${percent(stage.busy)}`),
    make("span", "where", atOnce(stage)));
  if (stage.errors) box.append(make("span", "failed", `${number(stage.errors)} skipped`));
  box.title = `${stage.label}: busy ${percent(stage.busy)}, no input ${percent(stage.no_input)}, no room ${percent(stage.no_room)}`;
  return box;
}

function links(stage, stream) {
  const channels = stream.channels.filter((one) => one.after === stage.name);
  if (!channels.length) return [make("div", "link bare")];
  return channels.map((channel) => {
    const bar = make("i", "");
    bar.style.width = `${100 * channel.fill}%`;
    return make("div", "link", `${number(channel.depth)} of ${number(channel.capacity)}`, make("u", "", bar));
  });
}

function graph(stream) {
  const worst = stream.verdict.how === "slow" ? stream.verdict.stage : null;
  const drawn = [];
  const branches = new Map();
  stream.stages.forEach((stage, at) => {
    const into = stage.branch === "" ? drawn : branches.get(stage.branch) || [];
    if (stage.branch !== "") branches.set(stage.branch, into);
    else if (branches.size && drawn.length === 0) {
      const all = [...branches.values()].map((parts) => make("div", "branch", ...parts));
      drawn.push(make("div", "branches", ...all), make("div", "link bare"));
    }
    const step = make("div", "step", stageBox(stage, worst));
    const last = stage.branch === "" && at === stream.stages.length - 1;
    if (!last || stream.channels.some((one) => one.after === stage.name)) step.append(...links(stage, stream));
    into.push(step);
  });
  if (stream.more_stages) drawn.push(make("p", "more", `and ${number(stream.more_stages)} more stages`));
  byId("graph").replaceChildren(...drawn);
}

function rows(id, found, cells) {
  byId(id).hidden = found.length === 0;
  const made = found.map((one) => {
    const row = make("tr", one.alive === false ? "gone" : "");
    for (const cell of cells(one)) row.append(make("td", "", cell));
    return row;
  });
  byId(id).querySelector("tbody").replaceChildren(...made);
}

function errors(found) {
  byId("errors").hidden = !found.total;
  const stages = found.stages.map((one) => `${one.name} ${number(one.items)}`).join(", ");
  byId("error-count").textContent = `${number(found.total)} items skipped: ${stages}${found.file ? ` · ${found.file}` : ""}`;
  byId("letters").replaceChildren(...found.last.map((letter) => make("li", "",
    make("small", "", `${letter.stage}, shard ${letter.shard}${letter.position ? `, ${letter.position}` : ""}`),
    letter.message)));
}

function verdict(found) {
  byId("verdict").dataset.how = found.how;
  byId("words").textContent = found.words;
  byId("rest").textContent = found.rest;
  byId("advice").textContent = found.advice;
}

const nameOf = (stream) => `${stream.name}, rank ${stream.rank}`;

function choices(streams) {
  const buttons = streams.map((stream) => {
    const button = make("button", "", streams.some((one) => one.rank !== 0) ? nameOf(stream) : stream.name);
    button.type = "button";
    button.setAttribute("aria-pressed", String(nameOf(stream) === chosen));
    button.addEventListener("click", () => { chosen = nameOf(stream); draw(latest); });
    return button;
  });
  byId("streams").replaceChildren(...buttons);
}

function draw(update) {
  latest = update;
  const log = update.events.map((event) => make("li", event.level,
    make("small", "", new Date(1000 * event.at).toLocaleTimeString("en-GB")), event.text));
  byId("events").replaceChildren(...(log.length ? log : [make("li", "more", "nothing to report")]));
  const stream = update.streams.find((one) => nameOf(one) === chosen) || update.streams[0];
  if (!stream) {
    verdict({ how: "ended", words: "No stream is open", rest: "between two epochs, or after the last", advice: "" });
    return;
  }
  chosen = nameOf(stream);
  document.title = `${stream.verdict.words} · streamline`;
  choices(update.streams);
  verdict(stream.verdict);
  facts(stream, update.time);
  graph(stream);
  errors(stream.errors);
  rows("hosts", stream.hosts, (host) => [
    host.alive ? host.name : `${host.name} (ended)`, host.cpu === null ? "–" : percent(host.cpu),
    host.memory === null ? "–" : size(host.memory), number(host.restarts), host.at || "–"]);
  byId("hosts").querySelector(".more").textContent = stream.more_hosts ? `and ${number(stream.more_hosts)} more` : "";
  rows("reads", stream.reads, (read) => [
    read.name, number(read.in_flight), number(read.requests_s), `${size(read.bytes_s)}`, number(read.retries),
    read.hits + read.misses ? percent(read.hits / (read.hits + read.misses)) : "–"]);
  rows("mixtures", stream.mixtures.flatMap((mixture) => mixture.parts), (part) => [
    part.name, percent(part.wanted), percent(part.served), number(part.items)]);
}

const updates = new EventSource("events");
updates.addEventListener("message", (event) => {
  const update = JSON.parse(event.data);
  const status = byId("connection");
  status.className = "";
  status.textContent = `live, ${new Date(1000 * update.time).toLocaleTimeString("en-GB")}`;
  draw(update);
});
updates.addEventListener("error", () => {
  const status = byId("connection");
  status.className = "lost";
  status.textContent = latest ? `no connection: as of ${new Date(1000 * latest.time).toLocaleTimeString("en-GB")}` : "no connection";
  document.title = "no connection · streamline";
});
