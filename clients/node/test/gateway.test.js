import assert from 'node:assert/strict';
import { mkdtempSync, rmSync } from 'node:fs';
import http from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, beforeEach, test } from 'node:test';
import { LimitedError, RefusedError, RejectedError, Tallyd, UnconfirmedError } from '../src/index.js';

const LIKE = { type: 'like', kind: 'video', target_id: '42', user_id: '7', at: 1795251385000005 };
const COUNT = { type: 'count', kind: 'video', target_id: '42', metric: 'share', delta: 1, event_id: 'e', at: 1795251385000006 };

const verdicts = (verdict) => (events) => ({ events: events.map((event) => verdict(event)) });
const confirmed = (events) => [202, verdicts(({ at }) => ({ verdict: 'confirmed', at }))(events)];
const unconfirmed = (events) => [503, verdicts(({ at }) => ({ verdict: 'unconfirmed', at, message: 'the broker is unreachable' }))(events)];
const busy = () => [503, { error: { code: 'busy', message: 'try again' } }];
const unauthorized = () => [401, { error: { code: 'unauthorized', message: 'send the token' } }];
// The connection ends without an answer.
const none = null;

const seen = { asked: [], connections: 0, answer: null };
let server;
let url;

function answer(path, asked) {
  const ids = asked.ids?.split(',') ?? [];
  if (path === '/v1/counters' && asked.kind === 'song') return [400, { error: { code: 'unknown-kind', message: 'kind is song' } }];
  if (path === '/v1/counters') return [200, { counters: ids.map((id) => ({ id, source: 'redis', [asked.metrics]: { 1: 12, 2: 3 }[id] ?? null })) }];
  if (path === '/v1/likes') return [200, { likes: ids.map((id) => ({ id, liked: id === asked.user })) }];
  if (path === '/v1/boards/top%2Fall') return [200, { board: 'top/all', members: [] }];
  return [500, 'no object'];
}

async function serve(request, response) {
  if (request.method === 'POST') return judge(request, response);
  const { pathname, searchParams } = new URL(request.url, 'http://localhost');
  const asked = Object.fromEntries(searchParams);
  seen.asked.push({ asked, authorization: request.headers.authorization });
  if (seen.answer) return seen.answer(request, response);
  const [status, object] = answer(pathname, asked);
  response.writeHead(status).end(JSON.stringify(object));
}

async function judge(request, response) {
  const parts = [];
  for await (const part of request) parts.push(part);
  const events = JSON.parse(Buffer.concat(parts));
  seen.posted.push(events);
  seen.traces.push(request.headers.traceparent);
  const answered = seen.answers.length > 1 ? seen.answers.shift() : seen.answers[0];
  if (!answered) return response.destroy();
  const [status, body] = answered(events);
  response.writeHead(status).end(JSON.stringify(body));
}

before(async () => {
  server = http.createServer(serve).on('connection', () => (seen.connections += 1));
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  url = `http://127.0.0.1:${server.address().port}`;
});
after(() => server.close());
beforeEach(() => Object.assign(seen, { posted: [], traces: [], answers: [confirmed] }));

test('numbers come by the ids as they were given', async () => {
  const site = new Tallyd({ gateway: url, token: 'secret' });
  assert.deepEqual(await site.counts('video', [1, '2', 3n]), new Map([[1, 12], ['2', 3], [3n, null]]));
  assert.deepEqual(await site.counts('video', [1], 'view'), new Map([[1, 12]]));
  assert.deepEqual(await site.liked('video', [7, 8], 7), new Map([[7, true], [8, false]]));
  assert.deepEqual((await site.board('top/all', { period: '2026-W48', around: 42n, radius: 5 })).members, []);
  assert.deepEqual(seen.asked.at(-1).asked, { period: '2026-W48', top: '100', around: '42', radius: '5' });
  assert.ok(seen.asked.every(({ authorization }) => authorization === 'Bearer secret'));
  assert.equal(seen.connections, 1);
  await site.close();
});

test('many ids are several requests', async () => {
  const site = new Tallyd({ gateway: `${url}/` });
  seen.asked.length = 0;
  assert.equal((await site.counts('video', Array.from({ length: 1_001 }, (_, id) => id + 1))).size, 1_001);
  assert.deepEqual(seen.asked.map(({ asked }) => asked.ids.split(',').length), [500, 500, 1]);
  await site.close();
});

test("an error has the gateway's code", async () => {
  const site = new Tallyd({ gateway: url });
  await assert.rejects(site.counts('song', [1]), { name: 'GatewayError', status: 400, code: 'unknown-kind' });
  await assert.rejects(site.board('nothing'), { name: 'GatewayError', status: 500, code: null });
  await site.close();
});

test('a gateway that does not answer makes no number', async () => {
  const away = new Tallyd({ gateway: 'http://127.0.0.1:1' });
  await assert.rejects(away.counts('video', [1]), { name: 'ReadError', message: /unknown/ });
  seen.answer = () => {};
  const slow = new Tallyd({ gateway: url, deadlineMs: 100 });
  await assert.rejects(slow.counts('video', [1]), { name: 'ReadError', message: /100 ms/ });
  seen.answer = null;
  await slow.close();
});

test('an idle connection that was closed is replaced', async () => {
  const site = new Tallyd({ gateway: url });
  await site.counts('video', [1]);
  seen.answer = (request) => {
    seen.answer = null;
    request.socket.destroy();
  };
  assert.deepEqual(await site.counts('video', [1]), new Map([[1, 12]]));
  await site.close();
});

test('a Unix socket works like an address', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'tallyd-'));
  const path = join(folder, 'gateway.sock');
  const local = http.createServer(serve);
  await new Promise((resolve) => local.listen(path, resolve));
  const site = new Tallyd({ gateway: `unix://${path}` });
  assert.deepEqual(await site.counts('video', [2]), new Map([[2, 3]]));
  await site.close();
  local.close();
  rmSync(folder, { recursive: true });
});

async function publish(events, settings) {
  const site = new Tallyd({ gateway: url, ...settings });
  try {
    return await site.publishMany(events);
  } catch (error) {
    return error.results;
  } finally {
    await site.close();
  }
}

test('the client asks for the trace at each publish', async () => {
  const traces = [1, 2].map((number) => `00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b${number}-01`);
  const given = [...traces, 'trace-3'];
  const site = new Tallyd({ gateway: url, traceparent: () => given.shift() });
  await site.like('video', 42, 7);
  await site.publishMany([LIKE, COUNT]);
  await site.publish(LIKE);
  await site.close();
  assert.deepEqual(seen.traces, [...traces, undefined]);
});

test('what the gateway has not confirmed is sent again', async () => {
  seen.answers = [busy, unconfirmed, confirmed];
  assert.deepEqual(await publish([LIKE, COUNT]), [LIKE, COUNT]);
  assert.deepEqual(seen.posted, [[LIKE, COUNT], [LIKE, COUNT], [LIKE, COUNT]]);
  seen.answers = [unconfirmed];
  const [late] = await publish([LIKE], { deadlineMs: 300 });
  assert.ok(late instanceof UnconfirmedError && late.event.at === 1795251385000005 && late.message.includes('the broker is unreachable'), late);
});

test('what the gateway may have published is not sent again', async () => {
  const site = new Tallyd({ gateway: url });
  await site.publish(LIKE);
  seen.answers = [none, confirmed];
  await assert.rejects(site.publish(COUNT), { name: 'UnconfirmedError', message: /no answer/, event: COUNT });
  assert.deepEqual(seen.posted, [[LIKE], [COUNT]]);
  await site.close();
});

test('closing leaves the request in flight its answer', async () => {
  const site = new Tallyd({ gateway: url });
  await site.publish(COUNT);
  seen.answers = [(events) => (site.close(), confirmed(events))];
  assert.deepEqual(await site.publish(LIKE), LIKE);
});

test('an unreachable gateway is asked until the deadline', async () => {
  const [away] = await publish([LIKE], { gateway: 'http://127.0.0.1:1', deadlineMs: 300 });
  assert.ok(away instanceof UnconfirmedError && away.message.includes('no connection'), away);
});

test('a wrong request is not tried again', async () => {
  seen.answers = [unauthorized];
  const [rejected] = await publish([LIKE]);
  assert.ok(rejected instanceof RejectedError && rejected.event.at === 1795251385000005 && rejected.message.includes('401 (unauthorized)'), rejected);
  assert.equal(seen.posted.length, 1);
});

test('a list that is not whole says the fate of each event', async () => {
  const judged = [{ verdict: 'confirmed', at: 1795251385000005 }, { verdict: 'refused', reason: 'unknown-kind', message: 'kind is song' }, { verdict: 'limited', wait_ms: 1_500 }];
  seen.answers = [() => [400, { events: judged }]];
  const events = [LIKE, { ...LIKE, kind: 'song' }, { ...LIKE, user_id: '8' }];
  const site = new Tallyd({ gateway: url });
  await assert.rejects(site.publishMany(events), (error) => {
    assert.match(error.message, /2 of 3 events were not confirmed \(RefusedError 1, LimitedError 1\)/);
    const [like, refused, limited] = error.results;
    assert.deepEqual([like, refused.reason, limited.waitMs], [LIKE, 'unknown-kind', 1_500]);
    assert.ok(error.name === 'PublishManyError' && refused instanceof RefusedError && limited instanceof LimitedError);
    assert.deepEqual(error.events, [events[2]]);
    return true;
  });
  await site.close();
});

test('new events get what they lack', async () => {
  const site = new Tallyd({ gateway: url });
  const [like, count] = [LIKE, COUNT].map(({ at, event_id, ...rest }) => rest);
  assert.equal((await site.publishMany(new Set([like, count]))).length, 2);
  assert.deepEqual(await site.publishMany([]), []);
  const [[first, second]] = seen.posted;
  assert.ok(first.at < second.at && second.event_id.length === 36);
  await site.close();
});

test('one event that is refused keeps the list from being sent', async () => {
  const site = new Tallyd({ gateway: url });
  const refused = { name: 'RefusedError', reason: 'target-id-out-of-range', message: /event 1 of the list/ };
  await assert.rejects(site.publishMany([LIKE, { ...LIKE, target_id: 0 }]), refused);
  assert.deepEqual(seen.posted, []);
});

test('a long list is several requests', async () => {
  const site = new Tallyd({ gateway: url });
  assert.equal((await site.publishMany(Array(1_001).fill(LIKE))).length, 1_001);
  assert.deepEqual(seen.posted.map(({ length }) => length), [1_000, 1]);
  await site.close();
});
