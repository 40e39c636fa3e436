#!/usr/bin/env node
// Likes a target, or reads likes:
//
//     like.js [--unlike] KIND TARGET_ID USER_ID
//     like.js --read [--mysql] KIND TARGET_ID...         numbers of likes; --mysql asks MySQL if Redis doesn't know them
//     like.js --liked-by USER_ID KIND TARGET_ID...       whether the user likes each target
//     like.js --count METRIC=DELTA [--event-id ID --at MICROSECONDS] KIND TARGET_ID
//                                                        changes a number other than likes; to retry, pass the same ID and
//                                                        MICROSECONDS, which it prints, even if it fails
//
// Needs Node 18 or later, and `npm ci` in this folder.

import { parseArgs } from 'node:util';
import { anId, Client, defaults } from './client.js';

const { env } = process;

function settings() {
  return {
    redisUrl: env.REDIS_URL ?? defaults.redisUrl,
    amqpUrl: env.AMQP_URL ?? defaults.amqpUrl,
    mysqlUrl: env.MYSQL_URL ?? defaults.mysqlUrl,
    exchange: env.EXCHANGE ?? defaults.exchange,
    keyPrefix: env.KEY_PREFIX ?? defaults.keyPrefix,
    bucketBits: Number(env.BUCKET_BITS ?? defaults.bucketBits),
    clicksMax: Number(env.CLICKS_MAX ?? defaults.clicksMax),
    timeoutMs: Number(env.TIMEOUT_S ?? defaults.timeoutMs / 1_000) * 1_000,
    filters: env.FILTERS === '1',
    board: env.BOARD ?? defaults.board,
    boardPeriods: env.BOARD_PERIODS?.split(' ') ?? defaults.boardPeriods,
  };
}

async function run(client, { unlike, read, mysql, count, 'event-id': eventId, at, 'liked-by': user }, [kind, ...ids]) {
  if (read) {
    const numbers = await (mysql ? client.readOrAsk(kind, ids) : client.read(kind, ids));
    return numbers.map((number) => number ?? 'unknown').join('\n');
  }
  if (user !== undefined) {
    return (await client.liked(kind, anId(user), ids)).map((state) => (state ? 'yes' : 'no')).join('\n');
  }
  if (count !== undefined) {
    const [metric, delta] = count.split('=');
    return JSON.stringify(await client.add(kind, ids[0], metric, Number(delta), eventId, at));
  }
  if (ids.length !== 2) throw new RangeError('pass a target and a user');
  const { waitMs, event, changed } = await client.click(unlike ? 'unlike' : 'like', kind, ...ids);
  if (waitMs !== undefined) throw new Error(`the user clicks too often: wait ${waitMs} ms`);
  return JSON.stringify({ ...event, changed });
}

const flag = { type: 'boolean', default: false };
const text = { type: 'string' };
const options = { unlike: flag, read: flag, mysql: flag, count: text, 'event-id': text, at: text, 'liked-by': text };
const { values, positionals } = parseArgs({ options, allowPositionals: true });
const client = new Client(settings());
try {
  const [kind, ...ids] = positionals;
  if (!Object.hasOwn(defaults.kinds, kind ?? '')) throw new RangeError(`kind is ${kind}: see [kinds]`);
  ids.forEach((id) => anId(id));
  await client.connect();
  console.log(await run(client, values, positionals));
} catch (error) {
  if (error.event?.type === 'count') console.log(JSON.stringify(error.event));
  console.error(`like.js: ${error.message}`);
  process.exitCode = 1;
} finally {
  await client.close();
}
