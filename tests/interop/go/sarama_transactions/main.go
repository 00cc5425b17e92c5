// Sarama's transactions: classic. It sends offsets when a transaction ends.
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

	"github.com/IBM/sarama"
)

var names = map[sarama.KError]string{
	sarama.ErrInvalidProducerEpoch: "INVALID_PRODUCER_EPOCH",
	sarama.ErrInvalidTxnState:      "INVALID_TXN_STATE",
	sarama.ErrProducerFenced:       "PRODUCER_FENCED",
}

func main() {
	bootstrap := strings.Split(os.Args[1], ",")
	transactions.Serve(transactions.Library{
		Open: func(command line.Command) (transactions.Producer, error) { return open(bootstrap, command) },
		Reader: func(topic string, partitions []int32, isolation string) (transactions.Reader, error) {
			return newReader(bootstrap, topic, partitions, isolation)
		},
		NameOf: nameOf,
	})
}

func nameOf(err error) string {
	var several sarama.ProducerErrors
	if errors.As(err, &several) && len(several) > 0 {
		err = several[0].Err
	}
	var code sarama.KError
	if errors.As(err, &code) {
		if name, found := names[code]; found {
			return name
		}
	}
	return "UNKNOWN_SERVER_ERROR"
}

func config() *sarama.Config {
	config := sarama.NewConfig()
	config.Version = sarama.MaxVersion
	config.Consumer.Return.Errors = true
	config.Consumer.MaxWaitTime = 100 * time.Millisecond
	config.Consumer.IsolationLevel = sarama.ReadCommitted
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Offsets.AutoCommit.Enable = false
	config.Consumer.Group.Session.Timeout = line.SessionTimeout
	config.Consumer.Group.Heartbeat.Interval = line.HeartbeatInterval
	return config
}

type producer struct {
	producer      sarama.SyncProducer
	group, source string
	member        *member
}

func open(bootstrap []string, command line.Command) (transactions.Producer, error) {
	config := config()
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Return.Successes = true
	config.Producer.Idempotent = true
	config.Producer.Partitioner = sarama.NewManualPartitioner
	config.Producer.Transaction.ID = command.ID
	config.Producer.Transaction.Timeout = time.Duration(command.TimeoutMs) * time.Millisecond
	// Sarama gives up after a few attempts; an election takes longer.
	config.Producer.Retry.Max = 100
	config.Producer.Transaction.Retry.Max = 200
	config.Metadata.Retry.Max = 100
	config.Net.MaxOpenRequests = 1
	made, err := sarama.NewSyncProducer(bootstrap, config)
	if err != nil {
		return nil, err
	}
	p := &producer{producer: made, group: command.Group, source: command.Source}
	if command.Group != "" {
		p.member, err = join(bootstrap, command.Group, command.Source)
	}
	return p, err
}

func (p *producer) Begin() error { return p.producer.BeginTxn() }

func (p *producer) Send(topic string, records []transactions.Outgoing) ([][2]int64, error) {
	var messages []*sarama.ProducerMessage
	for _, each := range records {
		messages = append(messages, &sarama.ProducerMessage{
			Topic: topic, Partition: each.Partition, Value: sarama.ByteEncoder(each.Value),
		})
	}
	if err := p.producer.SendMessages(messages); err != nil {
		return nil, err
	}
	written := [][2]int64{}
	for _, message := range messages {
		written = append(written, [2]int64{int64(message.Partition), message.Offset})
	}
	return written, nil
}

func (p *producer) Receive(count int) ([]transactions.Came, error) {
	var received []transactions.Came
	deadline := time.After(line.Patience)
	for len(received) < count {
		select {
		case message := <-p.member.messages:
			received = append(received, came(message))
		case <-deadline:
			return nil, fmt.Errorf("%d of %d records came", len(received), count)
		}
	}
	return received, nil
}

func (p *producer) SendOffsets(offsets map[int32]int64) error {
	var wanted []*sarama.PartitionOffsetMetadata
	for partition, offset := range offsets {
		wanted = append(wanted, &sarama.PartitionOffsetMetadata{Partition: partition, Offset: offset, LeaderEpoch: -1})
	}
	metadata := sarama.NewConsumerGroupMetadataFromSession(<-p.member.session, p.group, nil)
	return p.producer.AddOffsetsToTxnWithGroupMetadata(
		map[string][]*sarama.PartitionOffsetMetadata{p.source: wanted}, metadata)
}

func (p *producer) End(commit bool) error {
	if commit {
		return p.producer.CommitTxn()
	}
	return p.producer.AbortTxn()
}

func (p *producer) Close() error {
	if p.member == nil {
		return p.producer.Close()
	}
	return errors.Join(p.member.close(), p.producer.Close())
}

// member is a consumer in a group; sessions and messages are handed over one by one.
type member struct {
	group    sarama.ConsumerGroup
	messages chan *sarama.ConsumerMessage
	session  chan sarama.ConsumerGroupSession
	ended    chan struct{}
}

func join(bootstrap []string, name, source string) (*member, error) {
	group, err := sarama.NewConsumerGroup(bootstrap, name, config())
	if err != nil {
		return nil, err
	}
	m := &member{
		group, make(chan *sarama.ConsumerMessage), make(chan sarama.ConsumerGroupSession), make(chan struct{}),
	}
	go func() {
		for range group.Errors() {
		}
	}()
	go func() {
		defer close(m.ended)
		for {
			if err := group.Consume(context.Background(), []string{source}, m); err != nil {
				return
			}
		}
	}()
	return m, nil
}

func (m *member) Setup(session sarama.ConsumerGroupSession) error {
	go func() {
		for {
			select {
			case m.session <- session:
			case <-session.Context().Done():
				return
			}
		}
	}()
	return nil
}

func (m *member) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (m *member) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for message := range claim.Messages() {
		select {
		case m.messages <- message:
		case <-session.Context().Done():
			return nil
		}
	}
	return nil
}

func (m *member) close() error {
	err := m.group.Close()
	<-m.ended
	return err
}

type reader struct {
	consumer sarama.Consumer
	messages chan *sarama.ConsumerMessage
	failed   chan error
}

func newReader(bootstrap []string, topic string, partitions []int32, isolation string) (transactions.Reader, error) {
	config := config()
	if isolation == "read_uncommitted" {
		config.Consumer.IsolationLevel = sarama.ReadUncommitted
	}
	consumer, err := sarama.NewConsumer(bootstrap, config)
	if err != nil {
		return nil, err
	}
	r := &reader{consumer, make(chan *sarama.ConsumerMessage, 1000), make(chan error, 100)}
	for _, number := range partitions {
		partition, err := consumer.ConsumePartition(topic, number, 0)
		if err != nil {
			return nil, err
		}
		go func() {
			for message := range partition.Messages() {
				r.messages <- message
			}
		}()
		go func() {
			for err := range partition.Errors() {
				r.failed <- err
			}
		}()
	}
	return r, nil
}

func (r *reader) Poll(wait time.Duration) ([]transactions.Came, error) {
	select {
	case message := <-r.messages:
		return []transactions.Came{came(message)}, nil
	case err := <-r.failed:
		return nil, err
	case <-time.After(wait):
		return nil, nil
	}
}

func (r *reader) Close() { _ = r.consumer.Close() }

func came(message *sarama.ConsumerMessage) transactions.Came {
	return transactions.Came{Partition: message.Partition, Offset: message.Offset, Value: message.Value}
}
