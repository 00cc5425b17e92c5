// franz-go's transactions: v2 where the broker has it. In a group it sends offsets when a transaction ends.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"penstock/tests/interop/line"
	"penstock/tests/interop/transactions"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

func main() {
	seeds := kgo.SeedBrokers(strings.Split(os.Args[1], ",")...)
	transactions.Serve(transactions.Library{
		Open: func(command line.Command) (transactions.Producer, error) { return open(seeds, command) },
		Reader: func(topic string, partitions []int32, isolation string) (transactions.Reader, error) {
			return newReader(seeds, topic, partitions, isolation)
		},
		NameOf: nameOf,
	})
}

func nameOf(err error) string {
	var kafka *kerr.Error
	if errors.As(err, &kafka) {
		return kafka.Message
	}
	return "UNKNOWN_SERVER_ERROR"
}

func patience() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), line.Patience)
}

type producer struct {
	client *kgo.Client
	// Nil without a group.
	session *kgo.GroupTransactSession
}

func open(seeds kgo.Opt, command line.Command) (transactions.Producer, error) {
	ctx, cancel := patience()
	defer cancel()
	options := []kgo.Opt{
		seeds,
		kgo.TransactionalID(command.ID),
		kgo.TransactionTimeout(time.Duration(command.TimeoutMs) * time.Millisecond),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
	}
	p := &producer{}
	var err error
	if command.Group == "" {
		p.client, err = kgo.NewClient(options...)
	} else {
		options = append(options,
			kgo.ConsumerGroup(command.Group),
			kgo.ConsumeTopics(command.Source),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
			kgo.FetchIsolationLevel(kgo.ReadCommitted()),
			kgo.RequireStableFetchOffsets(),
			kgo.SessionTimeout(line.SessionTimeout),
			kgo.HeartbeatInterval(line.HeartbeatInterval),
		)
		p.session, err = kgo.NewGroupTransactSession(options...)
		if err == nil {
			p.client = p.session.Client()
		}
	}
	if err != nil {
		return nil, err
	}
	_, _, err = p.client.ProducerID(ctx)
	return p, err
}

func (p *producer) Begin() error {
	if p.session != nil {
		return p.session.Begin()
	}
	return p.client.BeginTransaction()
}

func (p *producer) Send(topic string, outgoing []transactions.Outgoing) ([][2]int64, error) {
	ctx, cancel := patience()
	defer cancel()
	var records []*kgo.Record
	for _, each := range outgoing {
		records = append(records, &kgo.Record{Topic: topic, Partition: each.Partition, Value: each.Value})
	}
	if err := p.client.ProduceSync(ctx, records...).FirstErr(); err != nil {
		return nil, err
	}
	written := [][2]int64{}
	for _, record := range records {
		written = append(written, [2]int64{int64(record.Partition), record.Offset})
	}
	return written, nil
}

func (p *producer) Receive(count int) ([]transactions.Came, error) {
	ctx, cancel := patience()
	defer cancel()
	var received []transactions.Came
	for len(received) < count {
		fetches := p.session.PollRecords(ctx, count-len(received))
		if err := fetches.Err(); err != nil {
			return nil, fmt.Errorf("%d of %d records came: %w", len(received), count, err)
		}
		received = append(received, came(fetches)...)
	}
	return received, nil
}

// SendOffsets does nothing: the session sends the offsets of what was polled when the transaction ends.
func (p *producer) SendOffsets(map[int32]int64) error { return nil }

func (p *producer) End(commit bool) error {
	ctx, cancel := patience()
	defer cancel()
	if p.session == nil {
		return p.client.EndTransaction(ctx, kgo.TransactionEndTry(commit))
	}
	committed, err := p.session.End(ctx, kgo.TransactionEndTry(commit))
	if err == nil && committed != commit {
		return fmt.Errorf("committed: %v", committed)
	}
	return err
}

func (p *producer) Close() error {
	if p.session != nil {
		p.session.Close()
	} else {
		p.client.Close()
	}
	return nil
}

type reader struct{ client *kgo.Client }

func newReader(seeds kgo.Opt, topic string, partitions []int32, isolation string) (transactions.Reader, error) {
	level := kgo.ReadUncommitted()
	if isolation == "read_committed" {
		level = kgo.ReadCommitted()
	}
	starts := map[int32]kgo.Offset{}
	for _, partition := range partitions {
		starts[partition] = kgo.NewOffset().At(0)
	}
	client, err := kgo.NewClient(
		seeds,
		kgo.FetchIsolationLevel(level),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: starts}),
	)
	return reader{client}, err
}

func (r reader) Poll(wait time.Duration) ([]transactions.Came, error) {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	fetches := r.client.PollFetches(ctx)
	if err := fetches.Err0(); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return nil, err
	}
	return came(fetches), nil
}

func (r reader) Close() { r.client.Close() }

func came(fetches kgo.Fetches) []transactions.Came {
	var read []transactions.Came
	for _, record := range fetches.Records() {
		read = append(read, transactions.Came{Partition: record.Partition, Offset: record.Offset, Value: record.Value})
	}
	return read
}
