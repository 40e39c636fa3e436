import assert from 'node:assert/strict';
import { mkdtempSync, rmSync } from 'node:fs';
import http from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { Tallyd } from '../src/index.js';

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

function serve(request, response) {
  const { pathname, searchParams } = new URL(request.url, 'http://localhost');
  const asked = Object.fromEntries(searchParams);
  seen.asked.push({ asked, authorization: request.headers.authorization });
  if (seen.answer) return seen.answer(request, response);
  const [status, object] = answer(pathname, asked);
  response.writeHead(status).end(JSON.stringify(object));
}

before(async () => {
  server = http.createServer(serve).on('connection', () => (seen.connections += 1));
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  url = `http://127.0.0.1:${server.address().port}`;
});
after(() => server.close());

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
  server.closeIdleConnections();
  await new Promise((resolve) => setTimeout(resolve, 50));
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
