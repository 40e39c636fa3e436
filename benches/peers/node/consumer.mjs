// A like consumer as Node teams write it, with amqplib and mysql2. The mode `row` sends one statement per message, with
// ten in parallel. The mode `batch` sends a multi-row upsert per batch. In both modes, the newest event wins, there are
// no counters, and messages are acknowledged after the commit.

import amqp from 'amqplib';
import mysql from 'mysql2/promise';

const { AMQP_URL, MYSQL_URL, QUEUE } = process.env;
const PREFETCH = Number(process.env.PREFETCH);
const BATCH = Number(process.env.BATCH);
const LINGER_MS = Number(process.env.LINGER_MS);
const KINDS = { video: 1 };
const CONNECTIONS = 10; // of `row`
// With this limit, every statement is smaller than max_allowed_packet.
const ROWS_PER_STATEMENT = 5000;

const INSERT = 'INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES ';
const NEWEST_WINS =
  ' ON DUPLICATE KEY UPDATE is_del = IF(VALUES(update_at) > update_at, VALUES(is_del), is_del),' +
  ' update_at = GREATEST(update_at, VALUES(update_at))';

// Microseconds since 1970.
const now = () => Math.round((performance.timeOrigin + performance.now()) * 1000);

const line = (event, events, at_us = now()) => `${JSON.stringify({ event, events, at_us })}\n`;

const say = (event, events) => process.stderr.write(line(event, events));

// Converts microseconds since 1970 to DATETIME(6). A Date is not enough, because it has only milliseconds.
function datetime(at) {
  const date = new Date(Math.floor(at / 1000)).toISOString();
  return `${date.slice(0, 10)} ${date.slice(11, 23)}${String(at % 1000).padStart(3, '0')}`;
}

function row(message) {
  const event = JSON.parse(message.content);
  return [KINDS[event.kind], event.target_id, event.user_id, event.type === 'unlike' ? 1 : 0, datetime(event.at)];
}

async function consumeRows(channel) {
  const pool = mysql.createPool({ uri: MYSQL_URL, connectionLimit: CONNECTIONS });
  // The times of the commits that are not logged yet.
  let unsaid = [];
  setInterval(() => {
    process.stderr.write(unsaid.map((at_us) => line('batch-committed', 1, at_us)).join(''));
    unsaid = [];
  }, 20);
  await channel.consume(QUEUE, async (message) => {
    await pool.execute(`${INSERT}(?, ?, ?, ?, ?)${NEWEST_WINS}`, row(message));
    channel.ack(message);
    unsaid.push(now());
  });
}

async function consumeBatches(channel) {
  const connection = await mysql.createConnection(MYSQL_URL);
  let open = [];
  let writing = false;
  let timer = null;

  async function write() {
    clearTimeout(timer);
    timer = null;
    writing = true;
    const batch = open.splice(0, BATCH);
    const rows = batch.map(row);
    // Sorts the rows in the order of the table's key.
    rows.sort((a, b) => a[1] - b[1] || a[2] - b[2]);
    if (rows.length <= ROWS_PER_STATEMENT) {
      await connection.query(`${INSERT}?${NEWEST_WINS}`, [rows]);
    } else {
      await connection.beginTransaction();
      for (let from = 0; from < rows.length; from += ROWS_PER_STATEMENT) {
        await connection.query(`${INSERT}?${NEWEST_WINS}`, [rows.slice(from, from + ROWS_PER_STATEMENT)]);
      }
      await connection.commit();
    }
    channel.ack(batch.at(-1), true);
    say('batch-committed', batch.length);
    writing = false;
    writeWhenDue();
  }

  function writeWhenDue() {
    if (writing || open.length === 0) return;
    if (open.length >= BATCH) write();
    else timer ??= setTimeout(write, LINGER_MS);
  }

  await channel.consume(QUEUE, (message) => {
    open.push(message);
    if (open.length >= BATCH || timer === null) writeWhenDue();
  });
}

const connection = await amqp.connect(AMQP_URL);
const channel = await connection.createChannel();
await channel.prefetch(PREFETCH);
say('consuming', 0);
await (process.argv[2] === 'row' ? consumeRows(channel) : consumeBatches(channel));
