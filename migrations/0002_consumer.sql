-- One row per partition, written by every batch first of all: a paused daemon that wakes up after a takeover writes nothing. Written and not
-- only locked, because servers of one cluster don't see each other's locks: of two writers of a row the one that commits second fails there.
CREATE TABLE IF NOT EXISTS partition_owner (
    `partition`  SMALLINT UNSIGNED NOT NULL,
    epoch        BIGINT UNSIGNED  NOT NULL COMMENT 'grows with each takeover',
    owner        VARCHAR(255)     NULL     COMMENT 'who holds it; NULL once given back in order',
    taken_at     DATETIME(6)      NOT NULL,
    outbox       BIGINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT 'the number of its last row in outbox, or more',
    watch        BIGINT UNSIGNED  NULL     COMMENT 'names the targets that are logged event by event',
    watch_until  DATETIME(6)      NULL     COMMENT 'after this the watch is void, whatever became of its run',
    batches      BIGINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT 'grows with each batch',
    is_behind    BOOLEAN          NOT NULL DEFAULT FALSE COMMENT 'more messages waited when the last batch was written',
    ledger_floor INT UNSIGNED     NOT NULL DEFAULT 0 COMMENT 'seconds since 1970: what is older may be gone from applied_event',
    PRIMARY KEY (`partition`)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- The highest fence of each job that is committed: all events before it are, too.
CREATE TABLE IF NOT EXISTS partition_fence (
    `partition` SMALLINT UNSIGNED NOT NULL,
    job         VARCHAR(64)       NOT NULL,
    fence       BIGINT UNSIGNED   NOT NULL,
    PRIMARY KEY (`partition`, job)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- Fences in queues that had no consumer when they were published: a queue without a consumer that has just as many messages has no event. Noted
-- before the fence is published, counted once the broker has confirmed it, deleted by the transaction in which a daemon drops the fence.
CREATE TABLE IF NOT EXISTS left_fence (
    `partition`  SMALLINT UNSIGNED NOT NULL,
    fence        BIGINT UNSIGNED   NOT NULL,
    is_confirmed BOOLEAN           NOT NULL COMMENT 'the broker has stored it',
    PRIMARY KEY (`partition`, fence)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- How many partitions are in use: noted before the first event can come to a new one, so that whoever waits for all events on the way knows
-- how many queues there are. It only grows.
CREATE TABLE IF NOT EXISTS partition_count (
    one        TINYINT UNSIGNED  NOT NULL COMMENT 'always 1: there is one row',
    partitions SMALLINT UNSIGNED NOT NULL,
    raised_at  DATETIME(6)       NOT NULL,
    raised_by  VARCHAR(255)      NOT NULL COMMENT 'the daemon that came with so many',
    layout     VARCHAR(255)      NULL COMMENT 'that of the daemon that started last, in Redis',
    also       VARCHAR(255)      NULL COMMENT 'its second one',
    PRIMARY KEY (one)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- What can never be applied. The digest makes a redelivered message one row.
CREATE TABLE IF NOT EXISTS dead_letter (
    id          BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
    digest      BINARY(32)      AS (UNHEX(SHA2(CONCAT(body, apart), 256))) STORED,
    body        MEDIUMBLOB      NOT NULL,
    apart       VARBINARY(32)   NOT NULL DEFAULT '' COMMENT 'a hash that tells letters with equal bodies apart, by their headers',
    headers     MEDIUMTEXT      NOT NULL COMMENT 'JSON',
    reason      VARCHAR(64)     NOT NULL COMMENT 'stable code',
    error       TEXT            NOT NULL COMMENT 'a sentence',
    queue       VARCHAR(255)    NOT NULL,
    first_seen  DATETIME(6)     NOT NULL,
    replayed_at DATETIME(6)     NULL     COMMENT 'NULL: it is open',
    refusals    INT UNSIGNED    NOT NULL DEFAULT 1 COMMENT 'a replay is noted only where nobody has refused it since',
    PRIMARY KEY (id),
    UNIQUE KEY dead_letter_digest (digest),
    -- By queue, because each partition may have so many.
    KEY dead_letter_open (replayed_at, queue, reason)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- Which `count` events were applied. Entries of one time lie together; a day that is over is emptied at once. 32 days go round.
CREATE TABLE IF NOT EXISTS applied_event (
    at_s INT UNSIGNED NOT NULL COMMENT 'the event''s `at` in seconds since 1970',
    id   BINARY(16)   NOT NULL COMMENT 'the beginning of SHA-256 of its `event_id`',
    PRIMARY KEY (at_s, id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC
  PARTITION BY HASH (at_s DIV 86400) PARTITIONS 32;

-- What batches have added to `counter` and the daemon adds to Redis after that. Numbers of a partition are given under the lock of its row in
-- partition_owner; each is at least the time in microseconds, so that none comes twice after a restore. Rows are kept for some minutes once
-- they are added: reconciles look at them.
CREATE TABLE IF NOT EXISTS outbox (
    `partition` SMALLINT UNSIGNED NOT NULL COMMENT '65535: what reconciles correct',
    number      BIGINT UNSIGNED   NOT NULL,
    written_at  DATETIME(6)       NOT NULL,
    body        MEDIUMBLOB        NOT NULL COMMENT 'kind:target_id:metric:delta, spaces between',
    PRIMARY KEY (`partition`, number),
    -- To count rows without reading their bodies.
    KEY outbox_number (`partition`, number)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- How far each partition's outbox is added to Redis, at least, and deleted.
CREATE TABLE IF NOT EXISTS outbox_state (
    `partition` SMALLINT UNSIGNED NOT NULL,
    applied     BIGINT UNSIGNED   NOT NULL DEFAULT 0 COMMENT 'every row up to this one is in Redis',
    pruned      BIGINT UNSIGNED   NOT NULL DEFAULT 0 COMMENT 'the highest row that was deleted',
    PRIMARY KEY (`partition`)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- The newest event that set a number. Whoever writes such a number writes this row first. at_us 0: none has set it yet.
CREATE TABLE IF NOT EXISTS number_set (
    kind      TINYINT UNSIGNED NOT NULL,
    target_id BIGINT UNSIGNED  NOT NULL,
    metric    TINYINT UNSIGNED NOT NULL,
    at_us     BIGINT           NOT NULL COMMENT 'the event''s `at`',
    value     BIGINT           NOT NULL,
    writes    BIGINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT 'grows with each batch that writes the number',
    PRIMARY KEY (kind, target_id, metric)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- What was lately added to numbers that may be set: an event that sets one and comes late still knows what followed it.
-- Emptied day by day, as applied_event.
CREATE TABLE IF NOT EXISTS recent_delta (
    kind      TINYINT UNSIGNED NOT NULL,
    target_id BIGINT UNSIGNED  NOT NULL,
    metric    TINYINT UNSIGNED NOT NULL,
    at_us     BIGINT           NOT NULL COMMENT 'the event''s `at`',
    id        BINARY(16)       NOT NULL COMMENT 'as in applied_event',
    delta     BIGINT           NOT NULL,
    PRIMARY KEY (kind, target_id, metric, at_us, id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC
  PARTITION BY HASH (at_us DIV 86400000000) PARTITIONS 32;
