// Package transactions is what Go's programs of transactions share: the commands, over a library's producer.
package transactions

import (
	"fmt"
	"slices"
	"time"

	"penstock/tests/interop/line"
)

// Mark is what a transformation appends to each value.
const Mark = '!'

// Settle is for how long a reader waits for more: these libraries do not say where a consumer is.
const Settle = 200 * time.Millisecond

// Came is a record that was read.
type Came struct {
	Partition int32
	Offset    int64
	Value     []byte
}

// Outgoing is a record to be written.
type Outgoing struct {
	Partition int32
	Value     []byte
}

// Producer is a library's transactional producer, with a consumer if it was opened in a group.
type Producer interface {
	Begin() error
	// Send waits for the answers: partition and offset of each record.
	Send(topic string, records []Outgoing) ([][2]int64, error)
	Receive(count int) ([]Came, error)
	// SendOffsets adds the offset after each partition's last record received.
	SendOffsets(offsets map[int32]int64) error
	End(commit bool) error
	Close() error
}

// Reader was assigned partitions of a topic from their starts.
type Reader interface {
	// Poll returns what there is, after the time given at the latest.
	Poll(wait time.Duration) ([]Came, error)
	Close()
}

// Library is what a program has to bring.
type Library struct {
	Open   func(command line.Command) (Producer, error)
	Reader func(topic string, partitions []int32, isolation string) (Reader, error)
	NameOf func(error) string
}

// Serve answers commands until the input ends.
func Serve(library Library) {
	var producers []Producer
	with := func(do func(Producer, line.Command) (any, error)) func(line.Command) (any, error) {
		return func(command line.Command) (any, error) { return do(producers[command.Producer], command) }
	}
	line.Answer(line.Handlers{
		"open": func(command line.Command) (any, error) {
			producer, err := library.Open(command)
			if err != nil {
				return nil, err
			}
			producers = append(producers, producer)
			return len(producers) - 1, nil
		},
		"begin": with(func(producer Producer, _ line.Command) (any, error) { return nil, producer.Begin() }),
		"send": with(func(producer Producer, command line.Command) (any, error) {
			var records []Outgoing
			for _, each := range command.Records {
				records = append(records, Outgoing{*each.Partition, each.Value})
			}
			return producer.Send(command.Topic, records)
		}),
		"transform": with(transform),
		"end": with(func(producer Producer, command line.Command) (any, error) {
			return nil, producer.End(command.Commit)
		}),
		"close": with(func(producer Producer, _ line.Command) (any, error) { return nil, producer.Close() }),
		"read":  func(command line.Command) (any, error) { return read(library, command) },
	}, library.NameOf)
}

func transform(producer Producer, command line.Command) (any, error) {
	if err := producer.Begin(); err != nil {
		return nil, err
	}
	received, err := producer.Receive(command.Count)
	if err != nil {
		return nil, err
	}
	var transformed []Outgoing
	offsets := map[int32]int64{}
	for _, each := range received {
		transformed = append(transformed, Outgoing{each.Partition, append(slices.Clone(each.Value), Mark)})
		offsets[each.Partition] = each.Offset + 1
	}
	if _, err := producer.Send(command.Topic, transformed); err != nil {
		return nil, err
	}
	return fields(received), producer.SendOffsets(offsets)
}

func read(library Library, command line.Command) (any, error) {
	var partitions []int32
	for _, end := range command.Ends {
		partitions = append(partitions, int32(end[0]))
	}
	reader, err := library.Reader(command.Topic, partitions, command.Isolation)
	if err != nil {
		return nil, err
	}
	defer reader.Close()
	var received []Came
	deadline := time.Now().Add(line.Patience)
	for len(received) < command.Count && time.Now().Before(deadline) {
		came, err := reader.Poll(100 * time.Millisecond)
		if err != nil {
			return nil, fmt.Errorf("%d of %d records came: %w", len(received), command.Count, err)
		}
		received = append(received, came...)
	}
	linger := time.Now().Add(max(Settle, time.Duration(command.LingerMs)*time.Millisecond))
	for time.Now().Before(linger) {
		came, err := reader.Poll(50 * time.Millisecond)
		if err != nil {
			return nil, err
		}
		received = append(received, came...)
	}
	return map[string]any{"records": fields(received), "positions": nil}, nil
}

func fields(records []Came) [][]any {
	read := [][]any{}
	for _, each := range records {
		read = append(read, []any{each.Partition, each.Offset, each.Value})
	}
	return read
}
