-- Fences in queues that had no consumer when they were published: a queue without a consumer that has just as many messages has no event. Noted
-- before the fence is published, counted once the broker has confirmed it, deleted by the transaction in which a daemon drops the fence.
CREATE TABLE IF NOT EXISTS left_fence (
    `partition`  SMALLINT UNSIGNED NOT NULL,
    fence        BIGINT UNSIGNED   NOT NULL,
    is_confirmed BOOLEAN           NOT NULL COMMENT 'the broker has stored it',
    PRIMARY KEY (`partition`, fence)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- Daemons that don't know this table would drop fences and leave their rows here.
INSERT INTO schema_floor (one, step) VALUES (1, 7) ON DUPLICATE KEY UPDATE step = GREATEST(step, 7);
