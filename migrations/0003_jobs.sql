-- Who runs a job now. `run` is the fencing token: what a run writes, it writes only while this row names it, in a transaction that writes
-- this row, too (see partition_owner).
CREATE TABLE IF NOT EXISTS job_lock (
    job         VARCHAR(64)     NOT NULL,
    run         BIGINT UNSIGNED NOT NULL,
    owner       VARCHAR(255)    NOT NULL,
    token       BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'of the process that runs it: a failover can give a run''s number twice',
    lease_until DATETIME(6)     NOT NULL,
    writes      BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'grows with each transaction that checks it',
    PRIMARY KEY (job)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- Every run: what is due is computed from here, so that a run missed while down is made up for.
CREATE TABLE IF NOT EXISTS job_run (
    run         BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
    job         VARCHAR(64)     NOT NULL,
    mode        VARCHAR(80)     NOT NULL,
    owner       VARCHAR(255)    NOT NULL,
    started_at  DATETIME(6)     NOT NULL,
    heartbeat_at DATETIME(6)    NULL COMMENT 'when it was last alive; looked for on the replicas',
    finished_at DATETIME(6)     NULL,
    outcome     VARCHAR(16)     NULL COMMENT 'done, failed, braked, refused, stopped, dry-run',
    cut         DATETIME(6)     NULL COMMENT 'reconcile: everything up to here has been compared',
    report      MEDIUMTEXT      NULL COMMENT 'JSON',
    checkpoint  TEXT            NULL COMMENT 'JSON: how far a run came that can be resumed',
    layout      VARCHAR(255)    NULL COMMENT 'reconcile: the layout in Redis that it compared',
    also        VARCHAR(255)    NULL COMMENT 'reconcile: the second one that API servers counted in',
    PRIMARY KEY (run),
    KEY job_run_mode (job, mode, finished_at)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- Targets too busy to be read between two events, and every event that the consumers saw of them while watched:
-- with them the value as of any instant is exact. Empty outside of a reconcile.
CREATE TABLE IF NOT EXISTS watched_target (
    watch     BIGINT UNSIGNED  NOT NULL,
    kind      TINYINT UNSIGNED NOT NULL,
    target_id BIGINT UNSIGNED  NOT NULL,
    metric    TINYINT UNSIGNED NOT NULL,
    PRIMARY KEY (watch, kind, target_id, metric)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS watched_event (
    watch      BIGINT UNSIGNED  NOT NULL,
    kind       TINYINT UNSIGNED NOT NULL,
    target_id  BIGINT UNSIGNED  NOT NULL,
    user_id    BIGINT UNSIGNED  NOT NULL,
    update_at  DATETIME(6)      NOT NULL COMMENT 'the event''s `at`',
    is_del     BOOLEAN          NOT NULL,
    is_former  BOOLEAN          NOT NULL COMMENT 'not an event: the state that the row had before it',
    PRIMARY KEY (watch, kind, target_id, user_id, update_at, is_del, is_former)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- The same of numbers that aren't likes: each change that was applied.
CREATE TABLE IF NOT EXISTS watched_count (
    watch      BIGINT UNSIGNED  NOT NULL,
    kind       TINYINT UNSIGNED NOT NULL,
    target_id  BIGINT UNSIGNED  NOT NULL,
    metric     TINYINT UNSIGNED NOT NULL,
    update_at  DATETIME(6)      NOT NULL COMMENT 'the event''s `at`',
    id         BINARY(16)       NOT NULL COMMENT 'as in applied_event; zeros where the number was set',
    delta      BIGINT           NULL     COMMENT 'NULL where the number was set',
    PRIMARY KEY (watch, kind, target_id, metric, update_at, id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- Every number that a reconcile or a recount changed, noted before it is changed: an outcome of NULL means that nobody was told.
CREATE TABLE IF NOT EXISTS repair (
    pass        BIGINT UNSIGNED   NOT NULL COMMENT 'the repair''s number: its run, and its place in the run',
    kind        TINYINT UNSIGNED  NOT NULL,
    target_id   BIGINT UNSIGNED   NOT NULL,
    metric      TINYINT UNSIGNED  NOT NULL,
    store       VARCHAR(8)        NOT NULL COMMENT 'redis, mysql: whose number it is',
    run         BIGINT UNSIGNED   NOT NULL,
    before_it   BIGINT            NOT NULL COMMENT 'the number, as of the cut it was measured at',
    added       BIGINT            NOT NULL,
    outcome     VARCHAR(16)       NULL COMMENT 'done, below-zero, stale',
    repaired_at DATETIME(6)       NOT NULL,
    PRIMARY KEY (pass, kind, target_id, metric),
    KEY repair_repaired_at (repaired_at)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- Targets at which the next `changed` reconcile looks first: a run left them undecided, a recount has corrected their counter, or an event came late.
CREATE TABLE IF NOT EXISTS drift_seen (
    kind      TINYINT UNSIGNED NOT NULL,
    target_id BIGINT UNSIGNED  NOT NULL,
    metric    TINYINT UNSIGNED NOT NULL,
    drift     BIGINT           NOT NULL,
    seen_at   DATETIME(6)      NOT NULL,
    PRIMARY KEY (kind, target_id, metric)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;
