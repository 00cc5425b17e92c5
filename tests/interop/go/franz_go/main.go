// franz-go behind the line protocol of tests/interop/adapters/program.py.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"penstock/tests/interop/line"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

var codecs = map[string]kgo.CompressionCodec{
	"none":   kgo.NoCompression(),
	"gzip":   kgo.GzipCompression(),
	"snappy": kgo.SnappyCompression(),
	"lz4":    kgo.Lz4Compression(),
	"zstd":   kgo.ZstdCompression(),
}

var acks = map[string]kgo.Acks{"0": kgo.NoAck(), "1": kgo.LeaderAck(), "all": kgo.AllISRAcks()}

type client struct {
	common []kgo.Opt
	admin  *kadm.Client
}

func main() {
	c := client{common: append(secured(line.Secured()), kgo.SeedBrokers(os.Args[1]))}
	administrator, err := c.connect()
	if err != nil {
		panic(err)
	}
	c.admin = kadm.NewClient(administrator)
	line.Serve(line.Handlers{
		"produce":           c.produce,
		"consume":           c.consume,
		"offset":            c.offset,
		"resume":            c.resume,
		"groups":            c.groups,
		"describe_group":    c.describeGroup,
		"committed":         c.committed,
		"alter_committed":   c.alterCommitted,
		"delete_committed":  c.deleteCommitted,
		"delete_group":      c.deleteGroup,
		"create_topic":      c.createTopic,
		"delete_topic":      c.deleteTopic,
		"create_partitions": c.createPartitions,
		"delete_records":    c.deleteRecords,
		"topics":            c.topics,
		"describe_topic":    c.describeTopic,
		"describe_configs":  c.describeConfigs,
		"alter_config":      c.alterConfig,
		"describe_cluster":  c.describeCluster,
	}, c.join, nameOf)
}

func secured(security line.Security) []kgo.Opt {
	if security.Protocol == "" {
		return nil
	}
	options := []kgo.Opt{kgo.DialTLSConfig(security.TLS())}
	account := scram.Auth{User: security.User, Pass: security.Password}
	switch security.Mechanism {
	case "SCRAM-SHA-256":
		options = append(options, kgo.SASL(account.AsSha256Mechanism()))
	case "SCRAM-SHA-512":
		options = append(options, kgo.SASL(account.AsSha512Mechanism()))
	}
	return options
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

func (c client) connect(options ...kgo.Opt) (*kgo.Client, error) {
	return kgo.NewClient(slices.Concat(c.common, options)...)
}

// Reading and writing

func (c client) produce(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	options := []kgo.Opt{
		kgo.RequiredAcks(acks[command.Acks]),
		kgo.ProducerBatchCompression(codecs[command.Codec]),
		kgo.ProducerLinger(20 * time.Millisecond),
		kgo.ProducerBatchMaxBytes(2_000_000),
	}
	if !command.Idempotent {
		options = append(options, kgo.DisableIdempotentWrite())
	}
	if len(command.Records) > 0 && command.Records[0].Partition != nil {
		options = append(options, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	}
	producer, err := c.connect(options...)
	if err != nil {
		return nil, err
	}
	defer producer.Close()
	var records []*kgo.Record
	for _, each := range command.Records {
		record := &kgo.Record{Topic: command.Topic, Key: each.Key, Value: each.Value}
		if each.Partition != nil {
			record.Partition = *each.Partition
		}
		if each.Timestamp != nil {
			record.Timestamp = time.UnixMilli(*each.Timestamp)
		}
		for _, header := range each.Headers {
			record.Headers = append(record.Headers, kgo.RecordHeader{Key: header.Name, Value: header.Value})
		}
		records = append(records, record)
	}
	written := [][2]int64{}
	if err := producer.ProduceSync(ctx, records...).FirstErr(); err != nil {
		return nil, err
	}
	for _, record := range records {
		written = append(written, [2]int64{int64(record.Partition), record.Offset})
	}
	return written, nil
}

func (c client) consume(command line.Command) (any, error) {
	starts := map[int32]kgo.Offset{}
	for _, start := range command.Starts {
		starts[int32(start[0])] = kgo.NewOffset().At(start[1])
	}
	consumer, err := c.connect(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{command.Topic: starts}))
	if err != nil {
		return nil, err
	}
	defer consumer.Close()
	records, err := receive(consumer, command.Count)
	return fields(records), err
}

func receive(consumer *kgo.Client, count int) ([]*kgo.Record, error) {
	ctx, cancel := patience()
	defer cancel()
	var received []*kgo.Record
	for len(received) < count {
		fetches := consumer.PollRecords(ctx, count-len(received))
		if err := fetches.Err(); err != nil {
			return nil, fmt.Errorf("%d of %d records came: %w", len(received), count, err)
		}
		received = append(received, fetches.Records()...)
	}
	return received, nil
}

func (c client) offset(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	var listed kadm.ListedOffsets
	var err error
	if at, isNumber := command.Timestamp(); isNumber {
		listed, err = c.admin.ListOffsetsAfterMilli(ctx, at, command.Topic)
	} else {
		ask := map[any]func(context.Context, ...string) (kadm.ListedOffsets, error){
			"earliest":      c.admin.ListStartOffsets,
			"latest":        c.admin.ListEndOffsets,
			"max_timestamp": c.admin.ListMaxTimestampOffsets,
		}[command.When]
		listed, err = ask(ctx, command.Topic)
	}
	if err != nil {
		return nil, err
	}
	found, _ := listed.Lookup(command.Topic, command.Partition)
	return found.Offset, found.Err
}

// Groups

func (c client) join(command line.Command) (*line.Member, error) {
	member := &line.Member{}
	lost := func(_ context.Context, _ *kgo.Client, lost map[string][]int32) {
		member.Revoked(lost[command.Topic])
	}
	balancer := kgo.RangeBalancer()
	if command.Strategy == "cooperative-sticky" {
		balancer = kgo.CooperativeStickyBalancer()
	}
	options := []kgo.Opt{
		kgo.ConsumerGroup(command.Group),
		kgo.ConsumeTopics(command.Topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.Balancers(balancer),
		kgo.SessionTimeout(line.SessionTimeout),
		kgo.HeartbeatInterval(line.HeartbeatInterval),
		kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, assigned map[string][]int32) {
			member.Assigned(assigned[command.Topic])
		}),
		kgo.OnPartitionsLost(lost),
		// A callback of one's own takes the place of the commit on revocation, so it has to commit.
		kgo.OnPartitionsRevoked(func(ctx context.Context, consumer *kgo.Client, revoked map[string][]int32) {
			if err := consumer.CommitUncommittedOffsets(ctx); err != nil {
				member.Failed(err)
			}
			lost(ctx, consumer, revoked)
		}),
	}
	if command.InstanceID != nil {
		options = append(options, kgo.InstanceID(*command.InstanceID))
	}
	consumer, err := c.connect(options...)
	if err != nil {
		return nil, err
	}
	ended := make(chan struct{})
	member.Close = func() {
		consumer.Close()
		<-ended
	}
	go func() {
		defer close(ended)
		for {
			fetches := consumer.PollFetches(context.Background())
			if fetches.IsClientClosed() {
				return
			}
			if err := fetches.Err(); err != nil {
				member.Failed(err)
			}
			member.Received(fields(fetches.Records())...)
		}
	}()
	return member, nil
}

func (c client) resume(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	consumer, err := c.connect(
		kgo.ConsumerGroup(command.Group),
		kgo.ConsumeTopics(command.Topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(),
	)
	if err != nil {
		return nil, err
	}
	defer consumer.Close()
	records, err := receive(consumer, command.Count)
	if err != nil {
		return nil, err
	}
	return fields(records), consumer.CommitRecords(ctx, records...)
}

func (c client) groups(line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	listed, err := c.admin.ListGroups(ctx)
	return listed.Groups(), err
}

func (c client) describeGroup(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	described, err := c.admin.DescribeGroups(ctx, command.Group)
	if err != nil {
		return nil, err
	}
	group := described[command.Group]
	members := []any{}
	for _, member := range group.Members {
		partitions := []int32{}
		if assigned, ok := member.Assigned.AsConsumer(); ok {
			for _, topic := range assigned.Topics {
				partitions = append(partitions, topic.Partitions...)
			}
		}
		members = append(members, map[string]any{
			"client_id": member.ClientID, "partitions": partitions, "instance_id": member.InstanceID,
		})
	}
	return map[string]any{"state": group.State, "assignor": group.Protocol, "members": members}, group.Err
}

func (c client) committed(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	fetched, err := c.admin.FetchOffsets(ctx, command.Group)
	if err != nil {
		return nil, err
	}
	found := [][2]int64{}
	for _, partition := range command.PartitionList() {
		if each, ok := fetched.Lookup(command.Topic, partition); ok {
			found = append(found, [2]int64{int64(partition), each.At})
		}
	}
	return found, fetched.Error()
}

func (c client) alterCommitted(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	return nil, c.admin.CommitAllOffsets(ctx, command.Group, offsets(command.Topic, command.Offsets))
}

func (c client) deleteCommitted(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	wanted := kadm.TopicsSet{}
	wanted.Add(command.Topic, command.PartitionList()...)
	deleted, err := c.admin.DeleteOffsets(ctx, command.Group, wanted)
	return nil, errors.Join(err, deleted.Error())
}

func (c client) deleteGroup(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	deleted, err := c.admin.DeleteGroup(ctx, command.Group)
	return nil, errors.Join(err, deleted.Err)
}

// Topics, settings and the cluster

func (c client) createTopic(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	configs := map[string]*string{}
	for name, value := range command.Configs {
		configs[name] = &value
	}
	created, err := c.admin.CreateTopic(ctx, command.PartitionCount(), 1, configs, command.Topic)
	return nil, errors.Join(err, created.Err)
}

func (c client) deleteTopic(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	deleted, err := c.admin.DeleteTopic(ctx, command.Topic)
	return nil, errors.Join(err, deleted.Err)
}

func (c client) createPartitions(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	created, err := c.admin.UpdatePartitions(ctx, command.Count, command.Topic)
	return nil, errors.Join(err, created.Error())
}

func (c client) deleteRecords(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	deleted, err := c.admin.DeleteRecords(ctx, offsets(command.Topic, command.Before))
	return nil, errors.Join(err, deleted.Error())
}

func (c client) topics(line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	listed, err := c.admin.ListTopics(ctx)
	return listed.Names(), err
}

func (c client) describeTopic(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	listed, err := c.admin.ListTopics(ctx, command.Topic)
	if err != nil {
		return nil, err
	}
	described := [][]any{}
	for _, each := range listed[command.Topic].Partitions.Sorted() {
		described = append(described, []any{each.Partition, each.Leader, each.Replicas, each.ISR})
	}
	return described, listed[command.Topic].Err
}

func (c client) describeConfigs(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	described, err := c.admin.DescribeTopicConfigs(ctx, command.Topic)
	if err != nil {
		return nil, err
	}
	configs := [][]any{}
	for _, each := range described[0].Configs {
		configs = append(configs, []any{each.Key, each.Value, each.Source.String() != "DYNAMIC_TOPIC_CONFIG"})
	}
	return configs, described[0].Err
}

func (c client) alterConfig(command line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	change := kadm.AlterConfig{Op: kadm.SetConfig, Name: command.Name, Value: command.Value}
	if command.Value == nil {
		change.Op = kadm.DeleteConfig
	}
	altered, err := c.admin.AlterTopicConfigs(ctx, []kadm.AlterConfig{change}, command.Topic)
	if err != nil {
		return nil, err
	}
	return nil, altered[0].Err
}

func (c client) describeCluster(line.Command) (any, error) {
	ctx, cancel := patience()
	defer cancel()
	described, err := c.admin.BrokerMetadata(ctx)
	brokers := [][]any{}
	for _, each := range described.Brokers {
		brokers = append(brokers, []any{each.NodeID, each.Host, each.Port})
	}
	return map[string]any{
		"cluster_id": described.Cluster, "controller_id": described.Controller, "brokers": brokers,
	}, err
}

func offsets(topic string, pairs [][2]int64) kadm.Offsets {
	wanted := kadm.Offsets{}
	for _, pair := range pairs {
		wanted.Add(kadm.Offset{Topic: topic, Partition: int32(pair[0]), At: pair[1], LeaderEpoch: -1})
	}
	return wanted
}

func fields(records []*kgo.Record) []line.Record {
	read := []line.Record{}
	for _, record := range records {
		each := line.Record{
			Partition: record.Partition, Offset: record.Offset, Timestamp: record.Timestamp.UnixMilli(),
			Key: record.Key, Value: record.Value,
		}
		for _, header := range record.Headers {
			each.Headers = append(each.Headers, line.Header{Name: header.Key, Value: header.Value})
		}
		read = append(read, each)
	}
	return read
}
