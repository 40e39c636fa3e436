-- A closed period's board, in rank order.
CREATE TABLE IF NOT EXISTS leaderboard_archive (
    board  VARCHAR(32)    NOT NULL,
    period VARCHAR(16)    NOT NULL COMMENT '2026-11-21, 2026-W47 or 2026-11',
    place  INT UNSIGNED   NOT NULL COMMENT 'from 1',
    member VARBINARY(255) NOT NULL,
    score  DOUBLE         NOT NULL,
    PRIMARY KEY (board, period, place)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- How far each closed period has come: frozen -> done -> ended.
CREATE TABLE IF NOT EXISTS leaderboard_period (
    board     VARCHAR(32)     NOT NULL,
    period    VARCHAR(16)     NOT NULL,
    state     VARCHAR(16)     NOT NULL,
    members   BIGINT UNSIGNED NOT NULL DEFAULT 0,
    checksum  BIGINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'over members and scores, in any order',
    frozen_at DATETIME(6)     NOT NULL,
    done_at   DATETIME(6)     NULL COMMENT 'copied and verified',
    ended_at  DATETIME(6)     NULL COMMENT 'gone from Redis',
    PRIMARY KEY (board, period)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;
