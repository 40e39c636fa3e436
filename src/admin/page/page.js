// Requests the daemon's status repeatedly, and shows the answers.

const [STATUS_EVERY, HISTORY_EVERY, ANSWER_MAX, REST_MAX] = [2000, 10000, 4000, 10000];
const RECONCILES_SHOWN = 6;
// The thresholds of the alerts TallydLagHigh and TallydQueueGrowing.
const [LAG_MAX_S, WAITING_MAX] = [30, 100000];
const ENDED_WELL = ["done", "stopped"];

// Maps each time to the values that the plots show at this time. The values of earlier daemon processes stay in the
// plots.
const history = new Map();
const starts = new Set();
let told = null;
let awaySince = null;
// If the page can't show the data that it received from an API path, this map contains the path and the error.
const unshown = new Map();

new Plot("plot-events", "Events per second", [{ name: "events per second", label: "", of: (one) => one.events_s }], rate, 4);
const LAG = [
  { name: "p50", label: "p50", of: (one) => one.lag_p50_s },
  { name: "p99", label: "p99", of: (one) => one.lag_p99_s },
];
new Plot("plot-lag", "Lag to commit", LAG, span, 0.02);
new Plot("plot-waiting", "Messages waiting", [{ name: "messages", label: "", of: (one) => one.waiting }], (value) => count(Math.round(value)), 4);
const drift = new Drift("plot-drift");

function showAll() {
  showState();
  showProcess();
  showTiles();
  showTroubles();
  showServers();
  showPartitions();
  showJobs();
  showBoards();
  showDeadLetters();
  showReconciles();
}

/** Shows the worst state in the banner. */
function showState() {
  const grave = told.troubles.filter((trouble) => trouble.grave).length;
  const some = told.troubles.length;
  let [state, words] = ["good", "✓ Ready: events are written"];
  if (told.state === "draining") [state, words] = ["mild", "… Stopping: open batches are written"];
  else if (told.state === "starting") [state, words] = ["mild", "… Starting: events are not written yet"];
  else if (!told.ready) [state, words] = ["grave", "✕ Not ready: events are not written"];
  else if (grave) [state, words] = ["grave", "! Ready: events are written, but there is a serious problem"];
  else if (some) [state, words] = ["mild", "! Ready: events are written, but there is a problem"];
  banner(state, words);
  const reasons = told.state === "running" ? [] : told.not_ready;
  put(byId("since"), reasons.length ? [reasons.join("; ")] : []);
}

function banner(state, words) {
  byId("banner").dataset.state = state;
  // A screen reader reads a text again after each assignment, even if the text is the same.
  if (byId("state").textContent !== words) byId("state").textContent = words;
  const title = `${words.split(":")[0]} – ${told ? told.owner : "tallyd"}`;
  if (document.title !== title) document.title = title;
}

function showProcess() {
  put(byId("owner"), [told.owner]);
  put(byId("version"), [told.version]);
  put(byId("up"), [lasting(told.started_at)]);
  put(byId("memory"), [bytes(told.memory_bytes)]);
  put(byId("observed"), told.observed_at ? [ago(told.observed_at)] : ["not yet"]);
}

function tile(id, state, value, ...note) {
  const element = byId(id);
  element.dataset.state = state;
  put(element.querySelector(".big"), [value]);
  put(element.querySelector(".note"), note);
}

// Messages in the queue, and messages that this process has received and not written yet.
const waiting = (partition) => (partition.messages === null ? null : partition.messages + partition.held);

function showTiles() {
  const { rate: last, partitions, troubles } = told;
  const [lag, half] = [last?.lag_p99_s ?? null, last?.lag_p50_s ?? null];
  const messages = partitions.reduce((sum, one) => sum + (waiting(one) ?? 0), 0);
  const isKnown = partitions.some((one) => one.messages !== null);
  const grave = troubles.filter((trouble) => trouble.grave).length;
  tile("tile-events", told.ready ? "" : "grave", last ? rate(last.events_s) : "–", `${count(told.events_committed)} since the start`);
  tile("tile-lag", lag > LAG_MAX_S ? "mild" : "", lag === null ? "–" : span(lag), half === null ? "no recent events" : `p50 ${span(half)}`);
  tile("tile-waiting", messages > WAITING_MAX ? "mild" : "", isKnown ? count(messages) : "–", `outbox backlog ${count(told.outbox_rows)}`);
  const state = grave ? "grave" : troubles.length ? "mild" : "good";
  tile("tile-problems", state, count(troubles.length), grave ? `${count(grave)} serious` : troubles.length ? "none serious" : "none");
}

function showTroubles() {
  byId("well").hidden = told.troubles.length > 0;
  put(byId("well"), [styled("good", told.observed_at ? "✓ No problems." : "Checking the servers …")]);
  const line = () => make("li", {}, make("p"), make("p", { class: "help" }));
  keyed(byId("troubles"), told.troubles, (trouble) => trouble.what, line, (element, trouble) => {
    const { grave, what, since, command: text, runbook } = trouble;
    element.dataset.style = grave ? "grave" : "mild";
    const during = since ? [styled("muted", "for"), lasting(since)] : [];
    put(element.firstChild, [styled(grave ? "grave" : "mild", grave ? "✕" : "!"), what, ...during]);
    put(element.lastChild, [...(text ? [command(text)] : []), ...(runbook ? [link("Runbook", runbook)] : [])]);
  });
  byId("failing").hidden = told.waits.length === 0;
  const wait = (one) => [[one.what], [ago(one.since)], [count(one.tries)], [one.reason]];
  rows("waits", told.waits, (one) => `${one.what} ${one.since}`, wait, "None.");
}

function showServers() {
  const server = (one) => [
    [one.server],
    [one.up ? styled("good badge", "✓ up") : styled("grave badge", "✕ down")],
    [ago(one.since)],
    one.up ? [span(one.look_s)] : [],
    one.reason ? [one.reason] : [],
  ];
  rows("servers", told.servers, (one) => one.server, server, "Checking …");
  const up = told.servers.filter((one) => one.up).length;
  fold("servers-section", up < told.servers.length, `${up} of ${told.servers.length} up`);
}

function showPartitions() {
  const here = { writing: "good", listening: "", failing: "grave", connecting: "grave", stopped: "mild", elsewhere: "muted" };
  const partition = (one) => [
    [one.queue],
    [styled(here[one.standing] ?? "", one.standing)],
    one.owner ? [one.owner === told.owner ? styled("badge", "this process") : one.owner] : [styled("muted", "no daemon")],
    one.owner && one.taken_at ? [ago(one.taken_at)] : [],
    [one.epoch ? `${one.epoch}` : styled("muted", "–")],
    [count(waiting(one))],
    [one.consumers === 0 ? styled("mild", "0") : count(one.consumers)],
    [one.oldest_unacked_s > 0 ? span(one.oldest_unacked_s) : styled("muted", "–")],
  ];
  rows("partitions", told.partitions, (one) => `${one.partition}`, partition, "The daemon consumes no partition yet.");
  const bad = told.partitions.some((one) => one.consumers === 0 || ["failing", "connecting", "stopped"].includes(one.standing));
  const writing = told.partitions.filter((one) => one.standing === "writing").length;
  fold("partitions-section", bad, `${writing} of ${told.partitions.length} written here`);
}

function showJobs() {
  rows("jobs", told.jobs, (one) => `${one.job} ${one.mode}`, job, "Unknown: MySQL has not answered yet.");
  const failed = told.jobs.filter((one) => one.last && !one.running && !ENDED_WELL.includes(one.last.outcome)).length;
  const running = told.jobs.filter((one) => one.running).length;
  fold("jobs-section", failed > 0, failed ? `${failed} failed` : `${running} running`);
}

function job({ job: name, mode, running, last, last_success_at: done, next_at: next }) {
  const now = [];
  if (running) {
    if (running.progress !== null) now.push(progress(running.progress), `${Math.floor(running.progress * 100)} %`);
    now.push("running for", lasting(running.started_at), styled("line", `on ${running.owner}`));
    if (running.waits_words) now.push(styled("line", `waits: ${running.waits_words}`));
  }
  const ended = [];
  if (last) {
    ended.push(outcome(last.outcome), ago(last.ended_at), styled("muted", `took ${span((last.ended_at - last.started_at) / 1e6)}`));
    if (last.reason) ended.push(styled("line", last.reason));
  }
  return [
    [`${name} ${mode}`],
    now,
    ended.length ? ended : [styled("muted", "never")],
    done ? [ago(done)] : [styled("muted", "never")],
    next ? [ahead(next)] : [styled("muted", "no schedule")],
  ];
}

function outcome(name) {
  return name === "done" ? styled("good badge", "✓ done") : styled("grave badge", `✕ ${name}`);
}

function reconcile(run) {
  return [
    [run.mode],
    [ago(run.ended_at)],
    [outcome(run.outcome)],
    [count(run.checked)],
    [run.drifted ? styled("mild", count(run.drifted)) : "0"],
    [count(run.repaired)],
    [count(run.transient)],
    [count(run.unknown)],
  ];
}

function showReconciles() {
  const runs = told.reconciles;
  drift.show(runs);
  rows("reconciles", runs.slice(-RECONCILES_SHOWN).reverse(), (run) => `${run.run}`, reconcile, "No run has ended yet.");
  const ended = runs.at(-1)?.outcome ?? null;
  fold("reconciles-section", ended !== null && !ENDED_WELL.includes(ended), ended === null ? "none yet" : `last run ${ended}`);
}

function showBoards() {
  const board = (one) => [
    [one.board],
    [styled("badge", one.period)],
    [one.state === "lost" ? styled("grave badge", "✕ lost") : one.state],
    [count(one.members)],
    one.ends_at ? [ahead(one.ends_at)] : [styled("muted", "never")],
    [
      one.archived ? `${one.archived[0]}, ${count(one.archived[1])} rows` : styled("muted", "none yet"),
      ...(one.unarchived.length ? [styled("mild", `! not archived: ${one.unarchived.join(", ")}`)] : []),
    ],
  ];
  rows("boards", told.boards, (one) => one.board, board, told.observed_at ? "None." : "Checking …");
  const lost = told.boards.filter((one) => one.lost.length || one.unarchived.length).length;
  fold("boards-section", lost > 0, lost ? `${lost} of ${told.boards.length} with a problem` : count(told.boards.length));
}

function showDeadLetters() {
  const letters = Object.entries(told.dead_letters ?? {});
  const shown = letters.map(([reason, open]) => [[reason], [count(open)], [command(`tallyd dead list --open --reason ${reason}`)]]);
  if (told.returned) shown.push([["returned too often"], [count(told.returned)], [command("tallyd dead list")]]);
  const nothing = told.dead_letters ? "None." : "Unknown.";
  rows("dead", shown, (row) => row[0][0], (row) => row, nothing);
  const open = letters.reduce((sum, [, number]) => sum + number, told.returned ?? 0);
  fold("dead-section", open > 0, told.dead_letters ? `${count(open)} open` : "unknown");
}

/** Plots all known points of the last hour, from any process, and shows the period. */
function showHistory() {
  for (const at of history.keys()) if (at < liveNow() - HOUR) history.delete(at);
  const points = [...history.values()].sort((one, other) => one.at - other.at);
  put(byId("reach"), [reachOf(points).words]);
  plots.forEach((plot) => plot.show(points, [...starts]));
}

/** Shows that the daemon does not answer. The page keeps the last known values. */
function showAway(error) {
  awaySince ??= liveNow();
  if (told) time.stopped ??= told.now;
  document.querySelectorAll(".known").forEach((element) => element.classList.toggle("stale", told !== null));
  banner("grave", "✕ The daemon does not answer");
  put(byId("well"), ["No earlier problems."]);
  const known = told ? ["The values below are from", ago(told.now), ""] : [];
  put(byId("since"), ["for", lasting(awaySince), `(${error}); retrying.`, ...known]);
}

/** Shows that the page could not show an answer. */
function showUnshown() {
  banner("grave", "✕ Rendering error: reload the page");
  put(byId("since"), [`(${[...unshown.values()].join("; ")})`]);
}

function take(status) {
  // A daemon of another version can serve a different page. If the version changed, the browser loads the page again.
  if (told && told.version !== status.version) location.reload();
  time.offset = status.now - Date.now() * 1000;
  time.stopped = null;
  awaySince = null;
  told = status;
  document.querySelectorAll(".stale").forEach((element) => element.classList.remove("stale"));
  showAll();
  // Nothing removes an entry from `starts`. So if showAll() throws an error, this line must not add an entry.
  starts.add(status.started_at);
  tick();
}

async function ask(path) {
  const late = (error) => error.name === "TimeoutError";
  const limits = { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MAX) };
  const answer = await fetch(path, limits).catch((error) => {
    throw new Error(late(error) ? `no answer within ${ANSWER_MAX / 1000} s` : "no connection");
  });
  const body = await answer.json().catch((error) => ({ error: late(error) ? "no complete answer" : "not JSON" }));
  if (!answer.ok || body.error) throw new Error(`the daemon answers ${answer.status}: ${body.error}`);
  return body;
}

/** Waits for this time, or until the page's visibility changes. */
function rest(milliseconds) {
  return new Promise((resolve) => {
    const over = () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", over);
      resolve();
    };
    const timer = setTimeout(over, milliseconds);
    document.addEventListener("visibilitychange", over);
  });
}

/** Requests the status until the page is closed, and less often while the daemon does not answer. */
async function forever(path, every, taken, failed) {
  for (let pause = every; ; await rest(pause)) {
    try {
      const body = await ask(path);
      pause = every;
      draw(path, () => taken(body));
    } catch (error) {
      pause = Math.min(pause * 1.5, Math.max(REST_MAX, every));
      draw(path, () => failed(error.message));
    }
  }
}

/** Draws a part of the page. A rendering error is an error of the page, so it does not count as a missing answer. */
function draw(path, drawing) {
  try {
    drawing();
    unshown.delete(path);
  } catch (error) {
    unshown.set(path, error.message);
    console.error(error);
  }
  if (unshown.size && awaySince === null) showUnshown();
}

setInterval(tick, 1000);
forever("v1/status", STATUS_EVERY, take, showAway);
forever(
  "v1/history",
  HISTORY_EVERY,
  (points) => {
    points.forEach((one) => history.set(one.at, one));
    showHistory();
  },
  showHistory,
);
