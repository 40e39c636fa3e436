// A like consumer as Go teams write it, with amqp091-go and go-sql-driver. The mode `batch` writes each batch with a
// multi-row upsert, in which the newest event wins, and keeps no counters. The mode `exact` uses a transaction that
// first reads the old states, and also keeps counters. Both modes acknowledge after the commit.
package main

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"log"
	"net/url"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"

	_ "github.com/go-sql-driver/mysql"
	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	insert     = "INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES "
	newestWins = " ON DUPLICATE KEY UPDATE is_del = IF(VALUES(update_at) > update_at, VALUES(is_del), is_del)," +
		" update_at = GREATEST(update_at, VALUES(update_at))"
	add        = "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES "
	addToOld   = " ON DUPLICATE KEY UPDATE value = value + VALUES(value), update_at = GREATEST(update_at, VALUES(update_at))"
	likeMetric = 1

	// With this limit, every statement is smaller than max_allowed_packet.
	rowsPerStatement = 5000
	// MariaDB turns longer IN lists into a join.
	pairsPerSelect = 500
)

var kinds = map[string]uint8{"video": 1}

type event struct {
	Type   string `json:"type"`
	Kind   string `json:"kind"`
	Target uint64 `json:"target_id,string"`
	User   uint64 `json:"user_id,string"`
	At     int64  `json:"at"`
}

type pair struct {
	kind         uint8
	target, user uint64
}

type state struct {
	pair
	at    int64
	isDel bool
}

func (a state) before(b state) bool {
	if a.target != b.target {
		return a.target < b.target
	}
	if a.user != b.user {
		return a.user < b.user
	}
	return a.at < b.at
}

func main() {
	log.SetFlags(0)
	writer := &writer{db: connectDatabase(), exact: len(os.Args) > 1 && os.Args[1] == "exact"}
	broker, err := amqp.Dial(os.Getenv("AMQP_URL"))
	check(err)
	channel, err := broker.Channel()
	check(err)
	check(channel.Qos(number("PREFETCH"), 0, false))
	say("consuming", 0)
	deliveries, err := channel.Consume(os.Getenv("QUEUE"), "", false, false, false, false, nil)
	check(err)
	check(consume(deliveries, writer))
}

// A batch closes when it is full, or LINGER_MS after its first message.
func consume(deliveries <-chan amqp.Delivery, writer *writer) error {
	max, linger := number("BATCH"), time.Duration(number("LINGER_MS"))*time.Millisecond
	batch := make([]amqp.Delivery, 0, max)
	var due <-chan time.Time
	for {
		select {
		case delivery, open := <-deliveries:
			if !open {
				return fmt.Errorf("the broker closed the channel")
			}
			if len(batch) == 0 {
				due = time.After(linger)
			}
			batch = append(batch, delivery)
			if len(batch) < max {
				continue
			}
		case <-due:
		}
		if err := writer.write(batch); err != nil {
			return err
		}
		if err := batch[len(batch)-1].Ack(true); err != nil {
			return err
		}
		say("batch-committed", len(batch))
		batch, due = batch[:0], nil
	}
}

type writer struct {
	db    *sql.DB
	exact bool
}

func (w *writer) write(batch []amqp.Delivery) error {
	states, err := decode(batch)
	if err != nil {
		return err
	}
	tx, err := w.db.Begin()
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if w.exact {
		old, err := readOld(tx, states)
		if err != nil {
			return err
		}
		if err := addDifferences(tx, states, old); err != nil {
			return err
		}
	}
	if err := upsert(tx, states); err != nil {
		return err
	}
	return tx.Commit()
}

// Returns the newest event of each pair, in the order of the key.
func decode(batch []amqp.Delivery) ([]state, error) {
	states := make([]state, 0, len(batch))
	for _, delivery := range batch {
		var e event
		if err := json.Unmarshal(delivery.Body, &e); err != nil {
			return nil, err
		}
		states = append(states, state{pair{kinds[e.Kind], e.Target, e.User}, e.At, e.Type == "unlike"})
	}
	sort.Slice(states, func(i, j int) bool { return states[i].before(states[j]) })
	newest := states[:0]
	for _, s := range states {
		if len(newest) > 0 && newest[len(newest)-1].pair == s.pair {
			newest[len(newest)-1] = s
		} else {
			newest = append(newest, s)
		}
	}
	return newest, nil
}

func readOld(tx *sql.Tx, states []state) (map[pair]state, error) {
	old := make(map[pair]state, len(states))
	for from := 0; from < len(states); from += pairsPerSelect {
		piece := states[from:min(from+pairsPerSelect, len(states))]
		args := make([]interface{}, 0, 3*len(piece))
		for _, s := range piece {
			args = append(args, s.kind, s.target, s.user)
		}
		rows, err := tx.Query("SELECT kind, target_id, user_id, is_del, update_at FROM like_record "+
			"WHERE (kind, target_id, user_id) IN ("+groups(len(piece), 3)+") FOR UPDATE", args...)
		if err != nil {
			return nil, err
		}
		for rows.Next() {
			var s state
			var at time.Time
			if err := rows.Scan(&s.kind, &s.target, &s.user, &s.isDel, &at); err != nil {
				return nil, err
			}
			s.at = at.UnixMicro()
			old[s.pair] = s
		}
		if err := rows.Close(); err != nil {
			return nil, err
		}
	}
	return old, nil
}

func addDifferences(tx *sql.Tx, states []state, old map[pair]state) error {
	type difference struct {
		kind   uint8
		target uint64
		value  int64
		at     int64
	}
	var differences []difference
	for _, s := range states {
		before, exists := old[s.pair]
		if exists && before.at >= s.at {
			continue
		}
		if n := len(differences); n == 0 || differences[n-1].target != s.target || differences[n-1].kind != s.kind {
			differences = append(differences, difference{kind: s.kind, target: s.target})
		}
		d := &differences[len(differences)-1]
		if !s.isDel {
			d.value++
		}
		if exists && !before.isDel {
			d.value--
		}
		if s.at > d.at {
			d.at = s.at
		}
	}
	for from := 0; from < len(differences); from += rowsPerStatement {
		piece := differences[from:min(from+rowsPerStatement, len(differences))]
		args := make([]interface{}, 0, 6*len(piece))
		for _, d := range piece {
			args = append(args, d.kind, d.target, likeMetric, 0, d.value, time.UnixMicro(d.at).UTC())
		}
		if _, err := tx.Exec(add+groups(len(piece), 6)+addToOld, args...); err != nil {
			return err
		}
	}
	return nil
}

func upsert(tx *sql.Tx, states []state) error {
	for from := 0; from < len(states); from += rowsPerStatement {
		piece := states[from:min(from+rowsPerStatement, len(states))]
		args := make([]interface{}, 0, 5*len(piece))
		for _, s := range piece {
			args = append(args, s.kind, s.target, s.user, s.isDel, time.UnixMicro(s.at).UTC())
		}
		if _, err := tx.Exec(insert+groups(len(piece), 5)+newestWins, args...); err != nil {
			return err
		}
	}
	return nil
}

// "(?,?),(?,?)"
func groups(rows, columns int) string {
	group := "(" + strings.TrimSuffix(strings.Repeat("?,", columns), ",") + ")"
	return strings.TrimSuffix(strings.Repeat(group+",", rows), ",")
}

// The driver puts the values into the statement's text, so each statement needs one round trip and is not prepared.
func connectDatabase() *sql.DB {
	u, err := url.Parse(os.Getenv("MYSQL_URL"))
	check(err)
	password, _ := u.User.Password()
	db, err := sql.Open("mysql", fmt.Sprintf("%s:%s@tcp(%s)%s?interpolateParams=true&parseTime=true",
		u.User.Username(), password, u.Host, u.Path))
	check(err)
	check(db.Ping())
	return db
}

func number(name string) int {
	value, err := strconv.Atoi(os.Getenv(name))
	check(err)
	return value
}

func say(event string, events int) {
	log.Printf(`{"event":%q,"events":%d,"at_us":%d}`, event, events, time.Now().UnixMicro())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func min(a, b int) int {
	if a < b {
		return a
	}
	return b
}
