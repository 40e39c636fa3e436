-- A closed period's board, in rank order.
CREATE TABLE IF NOT EXISTS leaderboard_archive (
    board  VARCHAR(32)    NOT NULL,
    period VARCHAR(16)    NOT NULL COMMENT '2026-11-21, 2026-W47 or 2026-11',
    place  INT UNSIGNED   NOT NULL COMMENT 'from 1',
    member VARBINARY(255) NOT NULL,
    score  DOUBLE         NOT NULL,
    copy   TINYINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'late writes are copied beside the archive: leaderboard_period.copy is the one that is verified',
    PRIMARY KEY (board, period, copy, place)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- How far each closed period has come: frozen -> done -> ended -> pruned.
CREATE TABLE IF NOT EXISTS leaderboard_period (
    board     VARCHAR(32)     NOT NULL,
    period    VARCHAR(16)     NOT NULL,
    state     VARCHAR(16)     NOT NULL,
    members   BIGINT UNSIGNED NOT NULL DEFAULT 0,
    checksum  BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'over members and scores, in any order',
    left_out  BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'members beyond archive_top',
    frozen_at DATETIME(6)     NOT NULL,
    done_at   DATETIME(6)     NULL COMMENT 'copied and verified',
    copy      TINYINT UNSIGNED NULL COMMENT 'which copy in leaderboard_archive is verified; none before the first is',
    generation BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'of the data in Redis that was archived: the run that first claimed the board there',
    note      BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'the run that had put it back into Redis before it was archived; 0 for none',
    late_members BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'how many Redis had moved into the frozen zset before it was archived',
    restored_at DATETIME(6)   NULL COMMENT 'put back into Redis from here',
    ended_at  DATETIME(6)     NULL COMMENT 'gone from Redis',
    pruned_at DATETIME(6)     NULL COMMENT 'gone from leaderboard_archive: archive_keep is over',
    PRIMARY KEY (board, period)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- What Redis had of each board that is not archived yet, when it was looked at the last time. The index reads a board in rank order.
CREATE TABLE IF NOT EXISTS leaderboard_snapshot (
    board         VARCHAR(32)    NOT NULL,
    period        VARCHAR(16)    NOT NULL COMMENT 'or total',
    member        VARBINARY(255) NOT NULL,
    score         DOUBLE         NOT NULL COMMENT 'as the zset has it',
    primary_value DOUBLE         NOT NULL COMMENT 'what is ranked by',
    second_value  INT UNSIGNED   NOT NULL COMMENT 'what decides between equals, where the score holds it',
    PRIMARY KEY (board, period, member),
    KEY by_rank (board, period, primary_value, second_value, member)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- How far each snapshot is. Redis holds the number, too: if it is gone there, so is the board.
CREATE TABLE IF NOT EXISTS leaderboard_snapshot_period (
    board        VARCHAR(32)     NOT NULL,
    period       VARCHAR(16)     NOT NULL,
    number       BIGINT UNSIGNED NOT NULL COMMENT 'the run that began the last one',
    generation   BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'of the data in Redis, as in leaderboard_period',
    members      BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'when it was complete',
    began_at     DATETIME(6)     NOT NULL,
    taken_at     DATETIME(6)     NULL COMMENT 'when the last complete one began',
    PRIMARY KEY (board, period)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

-- Which versions of tallyd can work with this schema: those that know of this step. A step that older ones can't live with raises it; one that
-- only adds leaves it, so that daemons of both versions run side by side while they are replaced.
CREATE TABLE IF NOT EXISTS schema_floor (
    one  TINYINT UNSIGNED NOT NULL COMMENT 'always 1: there is one row',
    step BIGINT           NOT NULL COMMENT 'the number of a file of migrations/',
    PRIMARY KEY (one)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC;

INSERT INTO schema_floor (one, step) VALUES (1, 4) ON DUPLICATE KEY UPDATE step = GREATEST(step, 4);
