import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Groups } from '../src/groups.js';

const TRACE = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';

const event = (number, more) => {
  const body = Buffer.from(`{"n":${number}}`);
  return { exchange: 'e', routingKey: `${number}`, body, traceparent: undefined, endsAt: number, entry: number, ...more };
};
const turn = () => new Promise(setImmediate);

function begun(groupMs = 0) {
  const lists = [];
  const groups = new Groups(groupMs, (list) => lists.push(list));
  const add = (...events) => events.forEach((each) => groups.add(each));
  return { add, groups, lists, entries: () => lists.map(({ entries }) => entries) };
}

test('events of one turn are one list, until the last deadline', async () => {
  const { add, lists } = begun();
  add(event(1), event(3), event(2));
  assert.deepEqual(lists, []);
  await turn();
  const body = Buffer.from('[{"n":1},{"n":3},{"n":2}]');
  assert.deepEqual(lists, [{ message: { exchange: 'e', routingKey: '1', body }, endsAt: 3, entries: [1, 3, 2] }]);
});

test('an event alone is a message of its own, with its trace as a header', async () => {
  const { add, lists } = begun();
  add(event(1, { traceparent: TRACE }));
  await turn();
  const message = { exchange: 'e', routingKey: '1', body: Buffer.from('{"n":1}'), traceparent: TRACE };
  assert.deepEqual(lists, [{ message, endsAt: 1, entries: [1] }]);
});

test('an event of a list has its trace as its first field', async () => {
  const { add, lists } = begun();
  add(event(1), event(2, { traceparent: TRACE }));
  await turn();
  assert.equal(lists[0].message.body.toString(), `[{"n":1},{"traceparent":"${TRACE}","n":2}]`);
});

test('an event after a shorter pause waits for the rest of it', async () => {
  const { add, lists, groups, entries } = begun(30);
  const began = performance.now();
  add(event(1));
  await turn();
  add(event(2), event(3));
  while (lists.length < 2) await turn();
  assert.ok(performance.now() - began > 29);
  assert.deepEqual(entries(), [[1], [2, 3]]);
  add(event(4));
  groups.flush();
  assert.deepEqual(entries(), [[1], [2, 3], [4]]);
});

test('a full list goes at once, and no list is larger', async () => {
  const { add, groups, entries } = begun(60_000);
  add(event(0));
  groups.flush();
  add(...Array.from({ length: 101 }, (_, number) => event(number + 1)));
  assert.deepEqual(entries().map(({ length }) => length), [1, 100]);
  const large = { body: Buffer.alloc(65_536, ' ') };
  add(...[1, 2, 3, 4].map((number) => event(number, large)));
  groups.flush();
  assert.deepEqual(entries().map(({ length }) => length), [1, 100, 4, 1]);
});

test('an event for another exchange or partition is in no list of others', async () => {
  const { add, groups, entries } = begun(60_000);
  add(event(0));
  groups.flush();
  add(event(1), event(2, { isAlone: true }), event(3), event(4, { exchange: 'f' }));
  groups.flush();
  assert.deepEqual(entries(), [[0], [2], [1, 3], [4]]);
});
